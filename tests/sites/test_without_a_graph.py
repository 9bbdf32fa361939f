"""Attention that a model computes without a graph: by its own checkpoint functions, and in truncated recurrences."""

import random

import pytest
import torch
from torch import nn

import qkeel

WIDTH = 32


class Recomputed(torch.autograd.Function):
    """A checkpoint function as in Megatron, DeepSpeed and unsloth: no graph in the forward, another run in backward."""

    @staticmethod
    def forward(ctx, run, offload, x, *weights):  # type: ignore[override]
        ctx.run = run
        ctx.save_for_backward(
            x.detach().to("cpu", copy=True) if offload else x.detach()
        )
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return (None, None, x.grad, *[None] * (len(ctx.needs_input_grad) - 3))


class Block(nn.Module):
    def __init__(self, heads, groups, fused, by_hand):
        super().__init__()
        self.heads, self.groups, self.by_hand = heads, groups, by_hand
        self.d = WIDTH // heads
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widths = [heads * self.d, groups * self.d, groups * self.d]
        sizes = [sum(self.widths)] if fused else self.widths
        self.projections = nn.ModuleList(
            [nn.Linear(WIDTH, n, bias=False) for n in sizes]
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.norm(x)
        parts = torch.cat([f(y) for f in self.projections], -1).split(self.widths, -1)
        q, k, v = (z.unflatten(-1, (-1, self.d)).transpose(1, 2) for z in parts)
        k, v = (z.repeat_interleave(self.heads // self.groups, 1) for z in (k, v))
        if self.by_hand:
            o = (q @ k.mT * self.d**-0.5).softmax(-1) @ v
        else:
            o = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def rows(self):
        """The weight of the queries, and its rows by head."""
        first = [*range(self.heads * self.d)]
        heads = [first[i : i + self.d] for i in range(0, len(first), self.d)]
        return "projections.0.weight", heads


class Model(nn.Module):
    def __init__(self, draw, way):
        super().__init__()
        heads = draw.choice([2, 4, 8])
        groups = draw.choice([g for g in (1, 2, 4, 8) if heads % g == 0])
        options = heads, groups, draw.random() < 0.5, draw.random() < 0.5
        self.blocks = nn.ModuleList([Block(*options) for _ in range(2)])
        self.way, self.offload = way, draw.random() < 0.5
        self.rounds = draw.choice([1, 2])

    def forward(self, x):
        if self.way == "truncated":
            with torch.no_grad():
                for _ in range(self.rounds):
                    for block in self.blocks:
                        x = block(x)
        for block in self.blocks:
            if self.way == "own function":
                x = Recomputed.apply(block, self.offload, x, *block.parameters())
            else:
                x = block(x)
        return x


@pytest.mark.parametrize("way", ["own function", "truncated"])
@pytest.mark.parametrize("seed", range(2))
def test_the_rows_of_each_head_are_known_and_the_clip_acts(way, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, x = Model(draw, way), torch.randn(2, 6, WIDTH)
    sites = qkeel.find_sites(model, x)
    assert [site.name for site in sites] == ["blocks.0", "blocks.1"]
    assert all(site.verified for site in sites)
    assert all(float(block.calls) == 0 for block in model.blocks)  # type: ignore[arg-type]
    for site, block in zip(sites, model.blocks):
        assert isinstance(block, Block)
        name, heads = block.rows()
        assert site.query[0].parameter == f"{site.name}.{name}"
        assert site.query[0].index.tolist() == heads
    before = {name: w.clone() for name, w in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.watch(model, optimizer, sites=sites) as monitor:
        model(x).square().mean().backward()
        optimizer.step()
    tops = monitor.sample.heads["max_logit"]
    tau = float(tops.min()) / 2
    with qkeel.apply(model, f"qk_clip:threshold={tau}", optimizer, batch=x):
        model(x).square().mean().backward()
        optimizer.step()
    for (name, weight), old in zip(model.named_parameters(), before.values()):
        # Queries and keys are clipped, in every block, and nothing else.
        assert torch.equal(weight, old) == (
            "projections" not in name
            or (
                len(model.blocks[0].projections) == 3 and "projections.2" in name  # type: ignore[union-attr, arg-type]
            )
        )
    with qkeel.apply(model, "qk_norm", optimizer, batch=x):
        assert all(site.normed for site in qkeel.find_sites(model, x))
