"""Scores after a view or an index: masks, logits before a cap, and which vectors they are made of go through it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.handwritten.products import Operand
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
