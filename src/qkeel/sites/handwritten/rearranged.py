"""Scores after a view, an index or a concatenation, which masks, logits before a cap and vectors go through too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.handwritten.products import Operand, Product, narrowed
from qkeel.sites.handwritten.tags import Scores

# Where these take numbers from depends on more than the dimensions: an expanded index would be written out.
_COPIES = frozenset({"as_strided", "flip", "gather", "index_select", "pad", "repeat", "roll", "take_along_dim"})


def rearranged(
    name: str, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor, *, whole: bool
) -> Scores | None:
    """The tag of `name(x, …)`, a view or an index. Unless `whole`, which vectors the scores are made of is followed
    through views only: anything else would write a number for every score."""
    method = getattr(torch.Tensor, "__getitem__" if name == "getitem" else name, None)
    op: Callable[..., Tensor] = torch.nn.functional.pad if name == "pad" else method or getattr(torch.ops.aten, name)

    def taken(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        with torch.no_grad():
            part = part.broadcast_to(x.shape)
            if name == "as_strided":
                part = torch.empty_strided(x.shape, x.stride(), dtype=part.dtype, device=part.device).copy_(part)
            return (
                op(part.to(torch.uint8), *args[1:], **kwargs).bool()
                if part.dtype == torch.bool
                else op(part, *args[1:], **kwargs)
            )

    picked = name in _COPIES or (name == "getitem" and not _is_view(args))

    def side(factor: Operand | None) -> Operand | None:
        if factor is None or factor.index is None:
            return factor
        index = factor.index.broadcast_to(x.shape)
        index = index.to(x.device) if picked else index
        new = _index(name, index, taken, args, whole) if whole or not picked else None
        return dataclasses.replace(factor, index=new)

    keys = tag.keys
    if keys is not None and out.shape[-1] != x.shape[-1]:
        keys = keys if out.shape[-1] >= keys[1] else None
    return dataclasses.replace(
        tag,
        parts=tuple(dataclasses.replace(p, left=side(p.left), right=side(p.right)) for p in tag.parts),
        hidden=taken(tag.hidden),
        uncapped=taken(tag.uncapped),
        before_tanh=taken(tag.before_tanh),
        unshifted=taken(tag.unshifted),
        keys=keys,
    )


def _index(
    name: str, index: Tensor, taken: Callable[[Tensor | None], Tensor | None], args: Args, whole: bool
) -> Tensor | None:
    """The numbers of the vectors, rearranged."""
    if name == "pad":
        return torch.nn.functional.pad(index, args[1], value=-1) if len(args) > 1 else None
    if name not in ("view", "reshape", "view_as", "reshape_as") or len(args) < 2:
        return taken(index)
    given = args[1].shape if isinstance(args[1], torch.Tensor) else args[1]
    sizes = [*given] if isinstance(given, (tuple, list, torch.Size)) else [*args[1:]]
    try:
        return index.view(sizes)
    except RuntimeError:  # an expanded index has no such view
        return index.reshape(sizes) if whole else None


def _is_view(args: Args) -> bool:
    """True if x[index] is a view: slices, numbers, None and an ellipsis only."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(i is None or i is Ellipsis or isinstance(i, (slice, int)) for i in index)


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
