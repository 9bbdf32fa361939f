"""A model on the meta device, whose weights have no values, as one on the CPU whose weights are drawn at random."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from qkeel.patching.module_tables import buffers_of, parameters_of


def on_meta(model: nn.Module) -> bool:
    """Returns whether weights of a model are on the meta device."""
    return any(p.is_meta for p in model.parameters())


def with_values(model: nn.Module) -> nn.Module:
    """A copy on the CPU: what is on the meta device is drawn at random, each tensor once, and no random stream moves.

    Matrices keep the size of what they multiply; gains and other vectors, and buffers, are near 1. Whole numbers are
    0, and truth values true, so that a mask among them hides nothing.
    """
    made = copy.deepcopy(model)
    source, drawn = torch.Generator().manual_seed(0), dict[int, Tensor]()
    for module in made.modules():
        own, buffers = parameters_of(module), buffers_of(module)
        for name, p in own.items():
            if p is not None and p.is_meta:
                value = drawn.setdefault(id(p), nn.Parameter(_drawn(p, source), p.requires_grad))
                assert isinstance(value, nn.Parameter)
                own[name] = value
        for name, x in buffers.items():
            if x is not None and x.is_meta:
                buffers[name] = drawn.setdefault(id(x), _drawn(x, source))
    return made


def _drawn(x: Tensor, source: torch.Generator) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)
    normal = torch.randn(x.shape, generator=source)
    return (normal / x.shape[-1] ** 0.5 if x.ndim > 1 else 1 + normal / 8).to(x.dtype)
