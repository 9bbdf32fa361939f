"""Concatenated scores: those of several blocks of keys in one row, and columns that are no keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkeel.sites.handwritten.products import Operand, Product, narrowed
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
        parts=_side_by_side(parts, out),
        lost=tuple(dict.fromkeys(text for _, _, tag in scores for text in tag.lost)),
        hidden=concatenated("hidden", lambda x, _: torch.zeros_like(x, dtype=torch.bool)),
        uncapped=concatenated("uncapped", itself),
        unshifted=concatenated("unshifted", itself),
        keys=(min(keys), max(keys)),
    )


def _side_by_side(parts: Sequence[tuple[Tensor, Scores | None]], out: Tensor) -> tuple[Product, ...]:
    """The products of all, one next to another: one product with the vectors of all, where each is one."""
    tags = [tag for _, tag in parts if tag is not None]
    sides = [tag.parts[0].sides for tag in tags if len(tag.parts) == 1]
    first = tags[0].parts[0]
    unknown = tuple(dataclasses.replace(p, left=None, right=None) for p in max((t.parts for t in tags), key=len))
    if len(sides) < len(tags) or any(pair is None for pair in sides):
        return unknown
    found = []
    for side in (0, 1):
        factors = [pair[side] for pair in sides if pair is not None]
        joint = _one_factor(parts, factors, out)
        if joint is None:
            return unknown
        found.append(joint)
    return (dataclasses.replace(first, left=found[0], right=found[1]),)


def _one_factor(
    parts: Sequence[tuple[Tensor, Scores | None]], factors: Sequence[Operand], out: Tensor
) -> Operand | None:
    """The vectors of several factors as those of one; None if they are of unequal size."""
    small = [narrowed(f.index).cpu() for f in factors if f.index is not None]
    first = factors[0]
    if all(f.x is first.x and torch.equal(small[0], s) for f, s in zip(factors, small)) and small[0].shape[-1] == 1:
        return dataclasses.replace(first, index=small[0].expand(out.shape))
    vectors = [f.vectors() for f in factors]
    if len({v.shape[1] for v in vectors}) > 1:
        return None
    lead = torch.broadcast_shapes(*(s.shape[:-1] for s in small))
    columns, each, start = [], iter(zip(small, vectors)), 0
    for x, tag in parts:
        if tag is None:
            columns.append(torch.full((*lead, x.shape[-1]), -1))
            continue
        index, own = next(each)
        columns.append(index.expand(*lead, x.shape[-1]) + start)
        start += len(own)
    return Operand(x=torch.cat(vectors), summed=(1,), index=torch.cat(columns, -1).expand(out.shape))
