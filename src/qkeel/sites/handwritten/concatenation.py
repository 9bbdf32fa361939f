"""Concatenated scores: those of several blocks of keys in one row, and columns that are no keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkeel.sites.handwritten.products import Product
from qkeel.sites.handwritten.tags import Scores

CATS = ("cat", "concat")


def joined(parts: Sequence[tuple[Tensor, Scores | None]], dim: int, out: Tensor) -> Scores | None:
    """The tag of what cat makes of scores and untagged columns; None where it attaches anything but columns.

    Untagged columns are sinks, which take weight and give no value. Several parts that are scores are one row of keys
    (global ones and those of a block).
    """
    if dim % out.ndim != out.ndim - 1:
        return None
    starts = [sum(x.shape[-1] for x, _ in parts[:n]) for n in range(len(parts))]
    scores = [(start, x, tag) for start, (x, tag) in zip(starts, parts) if tag is not None]
    keys = [start + place for start, x, tag in scores for place in tag.keys or (0, x.shape[-1])]

    def concatenated(field: str, otherwise: Callable[[Tensor, Scores | None], Tensor]) -> Tensor | None:
        own = [None if tag is None else getattr(tag, field) for _, tag in parts]
        if all(o is None for o in own):
            return None
        return torch.cat(
            [otherwise(x, tag) if o is None else o.detach().expand_as(x) for o, (x, tag) in zip(own, parts)], dim=-1
        )

    def itself(x: Tensor, tag: Scores | None) -> Tensor:
        return torch.zeros_like(x) if tag is None else x.detach()

    return dataclasses.replace(
        scores[0][2],
        product=_side_by_side([tag.product for _, _, tag in scores]),
        hidden=concatenated("hidden", lambda x, _: torch.zeros_like(x, dtype=torch.bool)),
        uncapped=concatenated("uncapped", itself),
        unshifted=concatenated("unshifted", itself),
        keys=(min(keys), max(keys)),
    )


def _side_by_side(products: list[Product]) -> Product:
    """One product with the keys of all, where their other dimensions allow it."""
    first = products[0]
    if len(products) == 1:
        return first
    sides = [p.k for p in products if p.k is not None]
    if len(sides) < len(products) or len({k.ndim for k in sides}) > 1:
        return dataclasses.replace(first, k=None)
    lead = torch.broadcast_shapes(*(k.shape[:-2] for k in sides))
    return dataclasses.replace(first, k=torch.cat([k.expand(*lead, *k.shape[-2:]) for k in sides], dim=-2))
