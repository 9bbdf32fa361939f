"""Layers that differ in nothing but the function by which they attend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention [b t 8] of two heads, whose queries come through a latent, a norm with gains and a rotation."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.down, self.up, self.kv, self.o = (
            nn.Linear(8, 4),
            nn.Linear(4, 8),
            nn.Linear(8, 16),
            nn.Linear(8, 8),
        )
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.up(self.down(x)).unflatten(-1, (2, 4)).transpose(1, 2))
        k, v = (
            y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.kv(x).chunk(2, -1)
        )
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1])
        q, k = (self._rotated(y, angles.cos(), angles.sin()) for y in (q, k))
        return x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    @staticmethod
    def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layers(nn.Module):
    """One layer for each way to attend."""

    def __init__(self, *ways: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(way) for way in ways])
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)
