"""Attention that a model computes without a graph: by its own checkpoint functions, and in truncated recurrences."""

import itertools

import pytest
import torch
from tests.attention import Attention, Joint, fused, values, written
from tests.training import sgd, step
from torch import nn

import qkeel


class Recomputed(torch.autograd.Function):
    """A checkpoint function as in Megatron, DeepSpeed and unsloth: no graph in the forward, another run in backward."""

    @staticmethod
    def forward(ctx, run, x, *weights):
        ctx.run = run
        ctx.save_for_backward(x.detach().to("cpu", copy=True))
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return (None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), attention
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self, kind, attend, is_truncated):
        super().__init__()
        self.is_truncated = is_truncated
        self.blocks = nn.ModuleList(
            Block(kind(attend, 32, 4, groups=2, bias=False)) for _ in range(2)
        )

    def forward(self, x):
        if self.is_truncated:
            with torch.no_grad():
                for block in self.blocks:
                    x = block(x)
        for block in self.blocks:
            x = (
                block(x)
                if self.is_truncated
                else Recomputed.apply(block, x, *block.parameters())
            )
        return x


@pytest.mark.parametrize("is_truncated", [True, False])
@pytest.mark.parametrize(
    ("kind", "attend"), [*zip((Attention, Joint), (written, fused))]
)
def test_the_rows_of_each_head_are_known_and_the_clip_acts(kind, attend, is_truncated):
    torch.manual_seed(0)
    model, x = Model(kind, attend, is_truncated), torch.randn(2, 6, 32)
    sites = qkeel.find_sites(model, x)
    weight = "q.weight" if kind is Attention else "qkv.weight"
    for site, (name, block) in itertools.zip_longest(
        sites, model.blocks.named_children()
    ):
        assert site.verified
        assert site.query[0].parameter == f"blocks.{name}.attention.{weight}"
        assert torch.equal(site.query[0].index, torch.arange(32).view(4, 8))
        assert float(block.calls) == 0
    before = values(model)
    optimizer = sgd(model, 0.0)
    with qkeel.watch(model, optimizer, sites=sites) as monitor:
        step(model, optimizer, x)
        tau = float(monitor.sample.heads["max_logit"].min()) / 2
    with qkeel.apply(model, f"qk_clip:threshold={tau}", optimizer, batch=x):
        step(model, optimizer, x)
    for name, p in model.named_parameters():  # grouped keys keep theirs
        assert torch.equal(p, before[name]) == (weight not in name), name
    with qkeel.apply(model, "qk_norm", optimizer, batch=x):
        assert all(site.normed for site in qkeel.find_sites(model, x))
