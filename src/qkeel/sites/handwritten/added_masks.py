"""The effect of masks on scores: torch functions that add, subtract or fill in numbers so low that a pair is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.calls.hidden_pairs import APART, hides, is_low
from qkeel.sites.handwritten.tags import Scores


def hidden_by_sum(tag: Scores, mask: object, like: Tensor, sign: float = 1.0) -> Scores:
    """The tag of scores after `sign` times a mask was added: some of its numbers hide pairs."""
    if not isinstance(mask, torch.Tensor) or mask.numel() == 1:
        return tag
    low = hides(sign * mask.detach())
    return tag.also_hidden(low, like) if bool(low.any()) else tag


def _added(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores:
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    return hidden_by_sum(tag, other, out)


def _subtracted(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    if not args or args[0] is not x:
        return None
    return hidden_by_sum(tag, args[1] if len(args) > 1 else kwargs.get("other"), out, -1.0)


def _filled(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    value = kwargs.get("value", args[2] if len(args) > 2 else None)
    return tag.also_hidden(mask, out) if isinstance(mask, torch.Tensor) and is_low(value) else tag


def _chosen(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    given = [*args, *kwargs.values()]
    if len(given) < 3:
        return None
    # torch.where(condition, a, b) and a.where(condition, b)
    condition, yes, no = given[:3] if given[0] is not x else (given[1], given[0], given[2])
    hidden = ~condition.bool() if yes is x else condition.bool()
    other = no if yes is x else yes
    if is_low(other):
        return tag.also_hidden(hidden, out)
    if isinstance(other, torch.Tensor) and other.numel() > 1:
        return tag.also_hidden(hidden & (other.detach() <= -APART), out)
    return tag


# tag of the scores, the scores, arguments of the function, what came out: the tag of that
_Rule = Callable[[Scores, Tensor, Args, Kwargs, Tensor], Scores | None]

MASKS: Mapping[str, _Rule] = {
    "add": _added,
    "radd": _added,
    "iadd": _added,
    "sub": _subtracted,
    "subtract": _subtracted,
    "isub": _subtracted,
    "masked_fill": _filled,
    "where": _chosen,
}
