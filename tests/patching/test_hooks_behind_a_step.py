"""A hook that waits for the end of one step leaves nothing behind."""

import functools
import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

from qkeel.patching.optimizers import when_hooks_are_done, when_made


def stepped(times, seen, handles):
    """An optimizer that asks at each step for a call at its end."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def after(own, *_):
        if handles:
            handles.pop().remove()
        handles.append(when_hooks_are_done(own, lambda _: seen.append(len(seen))))

    optimizer.register_step_post_hook(after)
    for _ in range(times):
        weight.grad = torch.ones(2)
        optimizer.step()
    return optimizer


def test_it_is_called_once_a_step_and_goes():
    seen = []
    optimizer = stepped(5, seen, [])
    assert seen == [*range(5)]
    assert not _global_optimizer_post_hooks
    left = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert left() is None, "a hook keeps its optimizer alive"


@pytest.mark.parametrize("how", ["handle", "optimizer"])
def test_behind_another_hook_it_goes_with_its_handle_or_its_optimizer(how):
    seen = []
    handles = []
    other = None

    def register(*_):
        nonlocal other
        other = register_optimizer_step_post_hook(lambda *_: None)

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(
        lambda own, *_: handles.append(
            when_hooks_are_done(own, lambda _: seen.append(len(seen)))
        )
    )
    optimizer.register_step_post_hook(register)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert seen == [0]
    assert (
        len(_global_optimizer_post_hooks) == 2
    )  # it could not go: it was not the last
    if how == "handle":
        handles[0].remove()
    handles.clear()
    del optimizer
    gc.collect()
    assert len(_global_optimizer_post_hooks) == 1
    other.remove()


def test_a_replacement_by_another_library_stays_when_the_watchers_go(
    monkeypatch,
):
    original, seen = torch.optim.Optimizer.__init__, []
    monkeypatch.setattr(
        torch.optim.Optimizer, "__init__", original
    )  # which is thereby restored after the test
    first = when_made(lambda _: seen.append("first"))
    ours = torch.optim.Optimizer.__init__

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        ours(self, *args, **kwargs)
        seen.append("theirs")

    torch.optim.Optimizer.__init__ = theirs
    second = when_made(lambda _: seen.append("second"))
    second.remove()
    first.remove()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert seen == ["theirs"]
    assert torch.optim.Optimizer.__init__ is theirs
