"""Scores that are written into a tensor of scores: a part of them, changed, in the place where it was."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.patching.graph_nodes import base_of
from qkeel.sites.calls.hidden_pairs import is_low
from qkeel.sites.handwritten.tags import Scores, Tags


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
