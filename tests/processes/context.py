"""Attention whose queries are split over processes and whose keys are gathered: context parallel, as some models do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

WIDTH, HEADS, TOKENS = 16, 2, 8


class Context(nn.Module):
    """[b t m] -> [b t m]; `rank` has the tokens of its half, None all of them."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        first = 0
        if self.rank is not None:
            k, v = (torch.cat(all_gather(y.contiguous()), 2) for y in (k, v))
            first = self.rank * q.shape[2]
        visible = torch.arange(k.shape[2]) <= first + torch.arange(q.shape[2])[:, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return x + out.transpose(1, 2).flatten(2)


def hidden(step: int) -> Tensor:
    """The hidden states of the global batch, [b t m]."""
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
