"""A fault of the monitor's never stops training: it warns once, steps aside, and not one number is another."""

import pytest
import torch
from tests.contract.watch.small import batch, train
from tests.contract.watch.test_bad_input import Plain
from tests.contract.watch.test_watch_faults import caught
from tests.training import sgd, step
from torch import nn

from qkeel import watch
from qkeel.monitor.recorder import Recorder
from qkeel.monitor.step_vector import StepVector
from qkeel.nn import Attention


def boom(*args, **kwargs):
    raise ValueError("boom")


@pytest.mark.filterwarnings("ignore::qkeel.errors.QkeelWarning")
@pytest.mark.parametrize("name", ["sample", "alarms", "history", "read", "table"])
def test_reading_a_monitor_never_raises_its_faults(name, monkeypatch):
    model, optimizer, monitor = train(lambda m, o: watch(m, o), steps=1)
    model(batch(0)).sum().backward()
    monkeypatch.setattr(Recorder, "_record", boom)
    monkeypatch.setattr(StepVector, "arrived", property(lambda _: False))
    optimizer.step()
    assert monitor.active
    value = getattr(monitor, name)
    if callable(value):
        value()
    assert not monitor.active


class Sometimes(nn.Module):
    """A module of qkeel's, and another attention that some batches alone reach."""

    def __init__(self, other):
        super().__init__()
        self.own, self.other, self.reached = Attention(16, 4), other, False

    def forward(self, x):
        x = self.own(x)
        return self.other(x) if self.reached else x


@pytest.mark.parametrize("build", [Plain, lambda: Attention(16, 2)])
def test_attention_that_comes_after_the_first_record_is_told(
    build,
):
    model = Sometimes(build())
    optimizer = sgd(model, 0.001)
    with watch(model, optimizer, every=1) as monitor:

        def steps(reached, n=2):
            model.reached = reached
            for _ in range(n):
                step(model, optimizer, torch.randn(2, 3, 16))

        assert caught(lambda: steps(False))[1] == []
        (told,) = caught(lambda: steps(True, 20))[1]
        assert "the attention of other was first seen at step 2" in told
        assert monitor.history.layers == ("own",)
    with watch(model, optimizer, every=1) as monitor:
        assert caught(lambda: steps(True))[1] == []
        assert monitor.history.layers == ("own", "other")
