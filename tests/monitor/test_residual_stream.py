"""The residual stream of a watched model: against numbers made from the model's own modules in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.drawing import randn
from tests.training import sgd, step
from torch import nn
from torch.nn import functional as F

import qkeel
from qkeel.records import BLOCK_FIELDS


class Mixer(nn.Module):
    """Attention of one head, written out."""

    def __init__(self, m):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(m, m) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x)[:, None] for p in (self.q, self.k, self.v))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        ), None


class Block(nn.Module):
    """A pre-norm block; subclasses say how it adds."""

    def __init__(self, m):
        super().__init__()
        self.norm_1, self.norm_2, self.after = (
            nn.LayerNorm(m),
            nn.LayerNorm(m),
            nn.LayerNorm(m),
        )
        self.mixer, self.drop = Mixer(m), nn.Dropout(0.3)
        self.mlp = nn.Sequential(nn.Linear(m, 2 * m), nn.GELU(), nn.Linear(2 * m, m))
        self.more = nn.Linear(m, m)

    def forward(self, x):
        x = x + self.mixer(self.norm_1(x))[0]
        return x + self.mlp(self.norm_2(x))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, kind, depth=3, m=12):
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(5, m),
            nn.ModuleList(kind(m) for _ in range(depth)),
            nn.Linear(m, 1),
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(kind, seed=0):
    """A stack with weights of unlike size, so that no two numbers agree by chance."""
    torch.manual_seed(seed)
    model = Stack(kind)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(1 + 0.3 * math.sin(i)).add_(0.05 * torch.randn_like(p))
        model.embed.weight[3] *= 400.0  # a massive channel
    return model


def rms(x):
    return float(np.sqrt(np.mean(x**2)))


def expected(model, passes):
    """Every field of every block, from float64, in numpy: over the tokens of all passes, ratios pass by pass."""
    exact = copy.deepcopy(model).double().eval()
    values = {name: [] for name in BLOCK_FIELDS}
    streams = [exact.embed(x.double()).detach() for x in passes]
    tokens = [x.shape[0] * x.shape[1] for x in passes]
    for block in exact.blocks:
        outputs = [block(x.clone()).detach() for x in streams]
        for side, states in (("input", streams), ("output", outputs)):
            peaks = [x.abs().numpy().max((0, 1)) for x in states]
            size = math.sqrt(
                np.average([rms(x.numpy()) ** 2 for x in states], weights=tokens)
            )
            values[f"block_{side}_rms"].append(size)
            values[f"block_{side}_max"].append(max(float(x.max()) for x in peaks))
            values[f"block_{side}_channel_ratio"].append(
                max(float(x.max() / np.median(x)) for x in peaks)
            )
        streams = outputs
    return values


def watched(model, passes):
    """Every field of every block as one measured step records it; in training mode."""
    optimizer = sgd(model, 0.0)
    with qkeel.watch(model, optimizer, stats="max+residual", rules=()) as monitor:
        for x in passes:
            loss = model(x).sum()
            loss.backward()
        optimizer.step()
        sample = monitor.sample
        assert sample is not None
    return {name: sample.by_layer(name).tolist() for name in BLOCK_FIELDS}


BATCHES = [randn(2, 7, 5, seed=s) * (1 + s) for s in range(2)]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_number_of_every_block_is_that_of_float64(
    seed,
):
    model = made(Block, seed)
    batches = [*BATCHES, BATCHES[0][:1, :3] * 0.5]
    found = watched(model, batches)
    for name, values in expected(model, batches).items():
        assert_allclose(found[name], values, rtol=3e-5, err_msg=name)


def test_blocks_without_attention_are_recorded_under_their_own_name():
    class Dense(Block):
        def forward(self, x):
            return x + self.mlp(self.norm_2(x))

    model = made(Block)
    model.blocks[1] = Dense(12)
    optimizer = sgd(model)
    with qkeel.watch(model, optimizer, stats="max+residual") as monitor:
        step(model, optimizer, BATCHES[0])
        sample = monitor.sample
        assert sample is not None
    assert sample.values["block_output_rms/blocks.1"] > 0
    assert (
        sample.summaries()["hidden/blocks.1/block_output_rms"]
        == sample.values["block_output_rms/blocks.1"]
    )
