"""Which keys the queries of one attention call see, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen


def visible_pairs(call: Seen) -> Tensor:
    """Returns which pairs [b h t s] of a call are visible; dimensions that all pairs share may be 1.

    A call of packed sequences has one batch entry that holds them all.
    """
    if isinstance(call, ScoresCall):
        shape = call.capped.shape
        visible = (
            torch.ones(shape, dtype=torch.bool)
            if call.hidden is None
            else ~call.hidden.cpu()
        )
        return visible.expand(shape)
    t, s = call.q.shape[2], call.k.shape[2]
    visible = call.visible(slice(0, t), slice(0, s))
    visible = (
        torch.ones(1, 1, t, s, dtype=torch.bool) if visible is None else visible.cpu()
    )
    return visible.expand(*visible.shape[:2], t, s)


def describe_visible(visible: Tensor) -> tuple[str, int | None]:
    """Describes which keys are visible [h t s], and returns the window in tokens if this batch shows one."""
    pairs = visible[0]
    t, s = pairs.shape
    if not bool((visible == pairs).all()):
        return "a mask that differs by head", None
    if bool(pairs.all()):
        return "every key", None
    distance = torch.arange(s - t, s)[:, None] - torch.arange(s)[None, :]
    if torch.equal(pairs, distance >= 0):
        return f"keys up to its own (of {s}; a wider window looks the same)", None
    reach = int(distance[pairs].max()) + 1 if bool(pairs.any()) else 0
    if torch.equal(pairs, (distance >= 0) & (distance < reach)):
        return f"the last {reach} keys, including its own", reach
    if torch.equal(pairs, distance.abs() < reach):
        return f"keys less than {reach} away on both sides", reach
    present = pairs.any(0)
    if torch.equal(pairs, present[None, :].expand_as(pairs)):
        return "every key that is not padding", None
    if torch.equal(pairs, present[None, :] & (distance >= 0)):
        return "keys up to its own that are not padding", None
    return "another pattern of keys", None
