"""Accelerate needs no door of its own: apply() takes what prepare() gives."""

import sys
from types import ModuleType

import pytest
from tests.drawing import randn
from tests.training import sgd
from torch import nn

from qkeel import apply

accelerate = pytest.importorskip("accelerate")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


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
