"""The effect of masks on scores: numbers so low that a pair is hidden, added, filled in or written in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qkeel.patching.graph_nodes import base_of
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.calls.hidden_pairs import APART, hides, is_low
from qkeel.sites.handwritten.tags import Scores, Tags


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
    **dict.fromkeys(("add", "radd", "iadd"), _added),
    **dict.fromkeys(("sub", "subtract", "isub"), _subtracted),
    "masked_fill": _filled,
    "where": _chosen,
}


def written(tag: Scores | None, x: Tensor, index: object, value: object, new: Scores | None) -> Scores | None:
    """The tag of scores x after x[index] = value; None if x are no scores, or become something else.

    Args:
        tag: that of x, None if it has none that is one of scores.
        x: the tensor after it.
        index: where it was written to.
        value: a number that hides, or scores.
        new: the tag of the value, None if it is none of scores.
    """
    if tag is None or not (is_low(value) or (new is not None and _same_kind(tag, new))):
        return None
    hidden = None if new is None else new.hidden
    if new is None or hidden is not None or tag.hidden is not None:
        whole = torch.zeros_like(x, dtype=torch.bool) if tag.hidden is None else tag.hidden.expand_as(x).clone()
        whole[index] = new is None if hidden is None else hidden.expand_as(value)  # type: ignore[arg-type,index]
        hidden = whole
    if new is None or _products(new) == _products(tag):
        return dataclasses.replace(tag, hidden=hidden)
    if isinstance(value, Tensor) and value.shape == x.shape:
        return dataclasses.replace(new, hidden=hidden)
    return dataclasses.replace(
        tag, hidden=hidden, lost=(*tag.lost, "a part of it is a sum of more products than the rest")
    )


def hidden_through_view(tags: Tags, x: Tensor, hidden: Tensor) -> None:
    """Pairs that were hidden in place in a view x of scores are hidden in these scores too."""
    for y, tag in tags.of_scores():
        if y is x or base_of(x) is not (y if base_of(y) is None else base_of(y)):
            continue
        more, start = torch.zeros_like(y, dtype=torch.bool), x.storage_offset() - y.storage_offset()
        end = start + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        if more.stride() == y.stride() and start >= 0 and end <= more.numel():
            more.as_strided(x.shape, x.stride(), start).copy_(hidden.expand_as(x))
            tags.put(y, tag.also_hidden(more, y))


def _same_kind(tag: Scores, new: Scores) -> bool:
    """True if the new scores are the old ones, masked, or a sum of them and more."""
    plain = all(part is None for one in (tag, new) for part in (one.uncapped, one.before_tanh, one.unshifted, one.keys))
    return plain and not new.lost and new.scale == tag.scale and _products(tag) <= _products(new)


def _products(tag: Scores) -> set[tuple[int, int]]:
    return {(id(a), id(b)) for a, b in (part.operands for part in tag.parts)}
