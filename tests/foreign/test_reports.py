"""Kinds of faults from public reports (experiments/notes/reports.md), drawn by a seed, each with a healthy twin."""

import random
import types

import pytest
import torch
from tests.attention import Attention, fused_causal, later
from torch import nn

import qkeel

WIDTH = 32


class Layer(Attention):
    def __init__(self, heads, groups, compute):
        super().__init__(compute, WIDTH, heads, groups=groups)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.o(super().forward(x))


class Model(nn.Module):
    """Layers of attention; the arguments of a pass are in reach of what computes it."""

    def __init__(self, draw, compute, groups=None):
        super().__init__()
        heads = draw.choice([2, 4])
        self.layers = nn.ModuleList(
            [Layer(heads, groups or heads, compute) for _ in range(2)]
        )
        self.config = types.SimpleNamespace(num_attention_heads=heads)
        self.attention_mask = None

    def forward(self, x, attention_mask=None):
        self.attention_mask = attention_mask
        for layer in self.layers:
            x = layer(x)
        return x


def by_hand(q, k, v, bias=0.0):
    z = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return z.masked_fill(later(q, k), -torch.inf).softmax(-1) @ v


def tokens(seed):
    torch.manual_seed(seed)
    return torch.randn(2, 4 + seed, WIDTH)


SEEDS = pytest.mark.parametrize("seed", range(4))


@SEEDS
def test_alibi_that_is_configured_and_not_added_is_said(seed):
    """huggingface/transformers#29067"""
    draw, x = random.Random(seed), tokens(seed)
    t = x.shape[1]
    distance = (torch.arange(t)[None] - torch.arange(t)[:, None]).float()

    def with_bias(q, k, v):
        slopes = 2.0 ** -torch.arange(1.0, 1 + q.shape[1])[:, None, None]
        return by_hand(q, k, v, slopes * distance)

    key = draw.choice(["alibi", "use_alibi"])
    for compute, is_lost in (
        (draw.choice([fused_causal, by_hand]), True),
        (with_bias, False),
    ):
        model = Model(draw, compute)
        setattr(model.config, key, True)
        told = [x for x in qkeel.explain(model, x).differences if key in x]
        assert bool(told) == is_lost


@SEEDS
def test_keys_repeated_along_the_tokens_are_said(seed):
    """PrimeIntellect-ai/prime-rl#2681, datawhalechina/tiny-universe#21"""
    draw, x = random.Random(seed), tokens(seed)
    in_a_row, is_lost = draw.random() < 0.5, seed % 2 == 0

    def compute(q, k, v):
        n, dim = q.shape[1], 2 if is_lost else 1
        if in_a_row or not is_lost:
            k, v = (y.repeat_interleave(n, dim) for y in (k, v))
        else:
            k, v = (torch.cat([y] * n, dim) for y in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v)

    sites = qkeel.explain(Model(draw, compute, groups=1), x).sites
    told = [y for site in sites for y in site.idle if "among the tokens" in y]
    assert len(told) == (2 if is_lost else 0)


@SEEDS
def test_a_scale_far_from_the_usual_is_said(seed):
    """FrancescoSaverioZuppichini/ViT#2, NVIDIA/Megatron-LM#848"""
    draw, x = random.Random(seed), tokens(seed)
    power = draw.choice([0.0, -0.5, -1.0])

    def compute(q, k, v):
        z = q @ k.mT * q.shape[-1] ** power
        z = z.masked_fill(later(q, k), -torch.inf)
        return z.softmax(-1) * q.shape[-1] ** -0.5 @ v

    text = str(qkeel.explain(Model(draw, compute), x))
    assert ("times the usual" in text) == (power != -0.5)


@SEEDS
def test_what_makes_an_output_nan_is_said_and_nothing_else(seed):
    """AshleyLab/OpenMHC#11, fairseq#1495, lucidrains/imagen-pytorch#69"""
    draw, x = random.Random(seed), tokens(seed)
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    fault = ["padding", "strict", "overflow", "none"][seed % 4]
    if fault == "padding":
        mask[1] = 0

    def compute(q, k, v):
        z = q @ k.mT * q.shape[-1] ** -0.5
        assert model.attention_mask is not None
        z = z.masked_fill(later(q, k), -torch.inf)
        z = z.masked_fill(model.attention_mask[:, None, None] == 0, -torch.inf)
        if fault == "strict":
            z = z.masked_fill(torch.eye(z.shape[-1], dtype=torch.bool), -torch.inf)
        if fault == "overflow":
            z = (z + 1e6).half().float()
        return z.softmax(-1) @ v

    model = Model(draw, compute)
    text = str(qkeel.check(model, {"x": x, "attention_mask": mask}))
    assert text.startswith("healthy") == (fault == "none")
    named = {
        "padding": "sample 1, query 0, which is padding, sees no key in layers.0",
        "strict": "sample 0, query 0 sees no key in layers.0",
    }
    assert ("sees no key" in text) == (fault in named)
    assert named.get(fault, "") in text


@SEEDS
def test_tiled_keys_are_measured_and_explained(seed):
    """onnx/onnx#7274"""
    draw, x = random.Random(seed), tokens(seed)

    def compute(q, k, v):
        n = q.shape[1] // k.shape[1]
        k, v = (y.repeat(1, n, 1, 1) for y in (k, v))
        return draw.choice([fused_causal, by_hand])(q, k, v)

    draw.choice = lambda options: options[-1]  # type: ignore[assignment, method-assign]
    recipe = qkeel.explain(Model(draw, compute, groups=2), x).sites[0]
    assert recipe.key_heads == (0, 1, 0, 1)
    assert recipe.key.kind == "none"
    assert recipe.scale == pytest.approx([recipe.head_dim**-0.5] * 4)
