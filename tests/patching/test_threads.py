"""A watched model that several threads call at once: passes that overlap are not measured, and one warning says so."""

import threading
import time
import warnings
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode

import qkeel
from qkeel.patching.guards import FaultGuard


class Gated(nn.Module):
    """Attention whose pass waits in the middle, as each thread says."""

    def __init__(self, own):
        super().__init__()
        torch.manual_seed(0)
        self.attention = (
            qkeel.nn.Attention(32, 4)
            if own
            else nn.MultiheadAttention(32, 4, batch_first=True)
        )
        self.own, self.gates = own, threading.local()

    def forward(self, x):
        vars(self.gates).get("before", lambda: None)()
        y = (
            self.attention(x)
            if self.own
            else self.attention(x, x, x, need_weights=False)[0]
        )
        vars(self.gates).get("gate", lambda: None)()
        return y


def largest(model, x):
    with qkeel.watch(model) as monitor:
        model(x)
    (stats,) = monitor.read().values()
    return stats.max_logit.tolist()


@pytest.mark.parametrize("own", [False, True])
def test_the_pass_that_began_first_is_measured_alone(own):
    model = Gated(own).train()
    a, b = torch.randn(2, 8, 32), 3 * torch.randn(2, 8, 32)
    expected = largest(model, a)
    assert largest(model, b) != expected
    inside, over = threading.Event(), threading.Event()
    modes = {}

    def first():
        model.gates.gate = lambda: (inside.set(), over.wait(60))
        model(a)
        modes["first"] = _get_current_function_mode()

    def second():
        inside.wait(60)
        model(b)
        modes["second"] = _get_current_function_mode()
        over.set()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = qkeel.watch(model)
        run([first, second])
        (stats,) = monitor.read().values()
        assert stats.max_logit.tolist() == expected
        model(b)
        (stats,) = monitor.read().values()
        assert stats.max_logit.tolist() != expected
        monitor.remove()
    assert modes == {"first": None, "second": None}
    assert ["several threads call Gated at once" in str(w.message) for w in caught] == [
        True
    ]
    assert (
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        == 0
    )


def test_a_thread_that_ended_in_the_middle_of_a_pass_blocks_no_other():
    model, x = Gated(False).train(), torch.randn(2, 8, 32)
    expected = largest(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = qkeel.watch(model)

        def stop():
            raise SystemExit

        def ended():
            model.gates.gate = stop
            with suppress(SystemExit):
                model(x)

        run([ended])
        monitor.read()
        model(x)
        (stats,) = monitor.read().values()
        monitor.remove()
    assert stats.max_logit.tolist() == expected


def run(acts):
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_the_time_in_a_guard_is_counted_once_in_each_thread_and_nested_calls_not_again():
    guard, inside, over = FaultGuard("{}"), threading.Event(), threading.Event()

    def other():
        guard(lambda: (inside.set(), over.wait(5)))

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(5)
    guard(lambda: guard(time.sleep, 0.01))  # while the other thread is inside
    alone = guard.seconds
    over.set()
    thread.join()
    assert alone >= 0.01
    assert guard.seconds >= 2 * alone  # the other waited all that time too
