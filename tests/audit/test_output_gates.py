"""Gates on the output of attention in `explain`: their means by head against float64, and none where there is none."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn

import qkeel


class Gated(nn.Module):
    def __init__(self, draw, shape):
        super().__init__()
        self.heads, self.shape = draw.choice([2, 4]), shape
        self.factor, self.by_hand = draw.choice([1, 2]), draw.random() < 0.5
        width = {"head": self.heads, "feature": 32, "none": 32}[shape]
        self.qkv, self.gate = nn.Linear(32, 96), nn.Linear(32, width)
        self.out = nn.Linear(32, 32)
        with torch.no_grad():
            # Some heads are shut.
            bias = self.gate.bias.view(self.heads, -1)
            bias[draw.randrange(self.heads)] = -8.0
        self.means: list[float] = []

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(x).chunk(3, -1)
        )
        if self.by_hand:
            o = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            o = nn.functional.scaled_dot_product_attention(q, k, v)
        o = o.transpose(1, 2)
        g = self.gate(x)
        exact = self.factor * g.detach().double().sigmoid().unflatten(
            -1, (self.heads, -1)
        )
        self.means = exact.mean((0, 1, 3)).tolist()
        if self.shape == "head":
            o = (o * self.factor * g.sigmoid()[..., None]).flatten(2)
        elif self.shape == "feature":
            o = torch.sigmoid(g) * o.reshape(*x.shape) * self.factor
            self.means = [mean / self.factor for mean in self.means]
        else:
            # A gate of something else.
            o = o.flatten(2) + g * g.sigmoid()
        return self.out(o)


@pytest.mark.parametrize("shape", ["head", "feature", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_means_of_gates_are_those_of_float64(shape, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(Gated(draw, shape), Gated(draw, shape))
    x = torch.randn(2, 5 + seed, 32)
    model(x)
    sites = qkeel.explain(model, x).sites
    for layer, site in zip(model, sites, strict=True):
        assert isinstance(layer, Gated)
        if shape == "none":
            assert not site.gate
            continue
        numbers = re.search(r"in the mean (.*) by head", site.gate)
        assert numbers is not None
        means = [float(x) for x in numbers[1].split(", ")]
        assert means == pytest.approx(layer.means, rel=5e-3)
        n = sum(mean < 0.05 for mean in layer.means)
        assert f"{n} of {layer.heads} heads" in site.gate
