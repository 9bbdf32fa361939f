"""Gates on the output of attention: their means by head against float64, none where there is none, and what `check`
and the first measured step say where most are shut."""

import random
import warnings

import numpy as np
import pytest
import torch
from tests.attention import to_heads
from tests.training import sgd, warned
from torch import nn

import qkeel
from qkeel.errors import QkeelWarning


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
        self.means = []

    def forward(self, x):
        q, k, v = (to_heads(y, self.heads, -1) for y in self.qkv(x).chunk(3, -1))
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
def test_gates_are_recorded_step_by_step_as_float64_has_them(shape, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Gated(random.Random(seed), shape) for _ in range(2)))
    optimizer = sgd(model, 30.0)
    records = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QkeelWarning)
        with qkeel.watch(model, optimizer, stats="all+gates") as monitor:
            for _ in range(3):
                model(torch.randn(2, 6, 32)).square().mean().backward()
                means = [layer.means for layer in model if isinstance(layer, Gated)]
                optimizer.step()
                optimizer.zero_grad()
                gates = monitor.sample.heads.get("output_gate")
                assert (gates is None) == (shape == "none")
                if gates is not None:
                    assert gates == pytest.approx(np.array(means), rel=1e-4)
                    records.append(gates)
    assert shape == "none" or abs(records[0] - records[2]).max() > 1e-3


@pytest.mark.parametrize("shape", ["head", "feature"])
@pytest.mark.parametrize("n_shut", [1, 3])
def test_gates_that_are_shut_are_told_by_check_and_at_the_first_measured_step(
    shape, n_shut
):
    torch.manual_seed(0)
    model = nn.Sequential(
        Gated(random.Random(1), shape), Gated(random.Random(5), shape)
    )
    assert [layer.heads for layer in model] == [2, 4]
    with torch.no_grad():
        for layer in model:
            layer.gate.bias.fill_(0.0)
        model[1].gate.bias.view(4, -1)[:n_shut] = -8.0
    x = torch.randn(2, 6, 32)
    expected = model(x).detach()
    optimizer = sgd(model)
    with warned(QkeelWarning) as said, qkeel.watch(model, optimizer):
        for _ in range(2):
            output = model(x)
            if _ == 0:
                assert torch.equal(output, expected)
            output.square().mean().backward()
            optimizer.step()
    sentence = f"the output gates of 1 are shut: {n_shut} of 4 heads"
    is_told = n_shut > 2
    assert sum(sentence in text for text in said) == is_told
    health = qkeel.check(model, x)
    assert (sentence in str(health)) == (not health.healthy) == is_told
