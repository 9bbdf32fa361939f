"""Attention whose queries are split across processes and whose keys are gathered: context parallel, as some models
do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

WIDTH, HEADS, TOKENS = 16, 2, 8


class Gathered(torch.autograd.Function):
    """[b h t d] of each process -> [b h all d] on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 2)[dist.get_rank()]


class Context(nn.Module):
    """[b t m] -> [b t m]; `rank` has the tokens of its half, None all of them."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(3)
        )
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        first = 0
        if self.rank is not None:
            k, v = Gathered.apply(k), Gathered.apply(v)
            first = self.rank * q.shape[2]
        visible = torch.arange(k.shape[2]) <= first + torch.arange(q.shape[2])[:, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return x + out.transpose(1, 2).flatten(2)


def split(model: Context, setup: str) -> nn.Module:
    """The model on this process, which has its part of the tokens."""
    model.rank = dist.get_rank()
    compiled = (
        torch.compile(model, backend="eager") if setup.endswith("_compile") else model
    )
    return nn.parallel.DistributedDataParallel(compiled)  # type: ignore[arg-type]


def hidden(step: int) -> Tensor:
    """The hidden states of the global batch, [b t m]."""
    return torch.randn(
        2,
        TOKENS,
        WIDTH,
        generator=torch.Generator().manual_seed(step),
        dtype=torch.float64,
    )
