"""A softmax that is written out: exponentials of scores, less the row's largest or its logsumexp, over their sum."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.handwritten.products import Product, operand
from qkeel.sites.handwritten.score_operators import ELEMENTWISE
from qkeel.sites.handwritten.tags import Powers, RowTop

OUTER = frozenset({"mul", "multiply"})


def row_top(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> RowTop | None:
    """The tag of what `name(x, …)` makes of scores, if that is one number per row, or for all."""
    last = over_last(x, args, kwargs)
    if name in ("amax", "max") and (last or (len(args) == 1 and "dim" not in kwargs)):
        return RowTop(False)
    return RowTop(True) if name == "logsumexp" and last else None


def over_last(x: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """True if a reduction goes over the last dimension and no other."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and not isinstance(dim, bool) and dim % x.ndim == x.ndim - 1


def raised(name: str, tag: Powers, x: Tensor, args: Args, kwargs: Kwargs) -> Powers | None:
    """The tag of `name(…)` of exponentials x: masks set some to 0; None where no exponentials come out."""
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    if name == "masked_fill":
        value = kwargs.get("value", args[2] if len(args) > 2 else None)
        zero = isinstance(other, Tensor) and value == 0
        return dataclasses.replace(tag, scores=tag.scores.also_hidden(other, x)) if zero else None  # type: ignore[arg-type]
    if name in ("mul", "multiply") and isinstance(other, Tensor) and other.numel() > 1:
        # A mask of zeros and ones hides, anything else makes other weights than a softmax.
        off = other == 0
        if bool((off | (other == 1)).all()):
            return dataclasses.replace(tag, scores=tag.scores.also_hidden(off, x))
        return None
    return tag if name in ELEMENTWISE and name not in ("div", "divide", "true_divide", "mul", "multiply") else None


def outer(name: str, args: Args, kwargs: Kwargs, out: object) -> Product | None:
    """The outer product q[..., :, None, :] * k[..., None, :, :], before its sum over the last dimension."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if name not in OUTER or len(given) != 2 or not isinstance(out, torch.Tensor):
        return None
    a, b = given
    if a.ndim != b.ndim or a.ndim < 4 or a.shape[-1] != b.shape[-1]:
        return None
    if a.shape[-3] == 1 and b.shape[-2] == 1 and b.shape[-3] > 1:
        a, b = b, a
    if a.shape[-2] == 1 and b.shape[-3] == 1 and b.shape[-2] > 1:
        n = a.ndim - 1
        left, right = (operand(x, (n,), [*range(n)], out[..., 0]) for x in (a, b))
        return Product(left=left, right=right, operands=(a, b))
    return None
