"""Weights whose attributes a layer's first pass moves elsewhere, as those of bitsandbytes' int8, are left to that pass."""

import torch
from tests.attention import Attention
from tests.drawing import randn
from torch import nn
from torch.nn import functional as F

import qkeel


class Int8Weight(nn.Parameter):
    """Integers; their scale is an attribute until the first pass of a layer."""

    scale: torch.Tensor | None

    def __new__(cls, data):
        scale = data.abs().amax() / 127
        weight = torch.Tensor._make_subclass(cls, (data / scale).round().char(), False)
        weight.scale = scale
        return weight

    def __deepcopy__(self, memo):
        raise NotImplementedError


class Int8Linear(nn.Linear):
    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = Int8Weight(linear.weight.detach())
        self.scale = None

    def forward(self, x):
        if self.weight.scale is not None:
            self.scale, self.weight.scale = self.weight.scale, None
        scale = 1.0 if self.scale is None else self.scale
        return F.linear(x, scale * self.weight.float())


class Layer(Attention):
    """Attention with a layer of integers after the call, which has not run when that is made."""

    def __init__(self):
        super().__init__(m=16)
        self.out = Int8Linear(nn.Linear(16, 16))

    def forward(self, x):
        return x + self.out(super().forward(x))


def losses(watched):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    monitor = qkeel.watch(model, optimizer, rules=[]) if watched else None
    values = []
    for step in range(3):
        x = randn(2, 5, 16, seed=step)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    if monitor is not None:
        assert [site.verified for site in monitor.sites] == [True, True]
        monitor.close()
    return values


def test_a_search_leaves_the_attributes_of_weights_to_the_models_own_pass():
    assert losses(True) == losses(False)
