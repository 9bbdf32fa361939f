"""Accelerate needs no door of its own: watch() takes what prepare() gives."""

import sys
from types import ModuleType

import pytest
from tests.drawing import randn
from tests.training import sgd
from torch import nn

from qkeel import apply, watch
from qkeel.records import RunDirectory

accelerate = pytest.importorskip("accelerate")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_that_accumulated_gradients_lead_to(tmp_path):
    accelerate.state.GradientState._reset_state()  # shared by all accelerators of a process
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net))
    with watch(model, optimizer, every=1, sinks=tmp_path / "run"):
        for seed in range(8):
            with accelerator.accumulate(model):
                x = randn(2, 4, 8, seed=seed)
                accelerator.backward(model(x))
                optimizer.step()
                optimizer.zero_grad()
    metrics = RunDirectory(tmp_path / "run").metrics()
    assert [record["step"] for record in metrics] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_remedy_takes_the_prepared_optimizer_where_weights_may_be_split(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    net = Net()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, sgd(net))
    before = net.attention.in_proj_weight.detach().clone()
    with apply(model, "qk_lr:factor=0", optimizer, batch=randn(2, 4, 8, seed=0)):
        accelerator.backward(model(randn(2, 4, 8, seed=0)))
        optimizer.step()
    moved = (net.attention.in_proj_weight != before).any(1)
    assert not moved[:16].any()
    assert moved[16:].all()
