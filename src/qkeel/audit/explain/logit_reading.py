"""The scale, the visible keys and the sinks of an attention, from the logits of two passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.audit.explain.controlled_model import Observation


def products(reading: Observation, over: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q·k and the logits [h t s], each row less its mean over the keys of `over` [h t s], 0 elsewhere.

    What is the same for all keys of a row (a bias of k, a maximum taken off) does not change a softmax.
    """
    assert reading.logits is not None
    z = reading.q @ reading.k.repeat_interleave(len(reading.q) // len(reading.k), 0).mT
    count = over.sum(-1, keepdim=True).clamp_min(1)
    x, y = (torch.where(over, v, 0.0) for v in (z, reading.logits))
    x, y = (torch.where(over, v - v.sum(-1, keepdim=True) / count, 0.0) for v in (x, y))
    return x, y


def scale_of(one: Observation, two: Observation) -> tuple[float, ...] | None:
    """Returns s per head in z = s q·k + b, from two passes with other q and k and the same b; None if there is none."""
    if one.logits is None or two.logits is None:
        return (one.scale,) * len(one.q)
    both = one.visible & two.visible
    (x1, y1), (x2, y2) = products(one, both), products(two, both)
    x, y = (x1 - x2).flatten(1), (y1 - y2).flatten(1)
    energy = x.square().sum(1)
    if not bool((energy > 0).all()):
        return None  # no row sees two keys
    s = (x * y).sum(1) / energy
    rest = (y - s[:, None] * x).abs().amax(1)
    if not bool((rest <= max(1e-3, 30 * one.rounding) * y.abs().amax(1).clamp_min(1e-30)).all()):
        return None
    return tuple(s.tolist())


def seen(visible: Tensor) -> tuple[str, int | None]:
    """Returns which keys are visible [h t s] in words, and how many keys back where that is limited in this example."""
    v = visible[0]
    t, s = v.shape
    if not bool((visible == v).all()):
        return "a mask that differs by head", None
    if bool(v.all()):
        return "every key", None
    distance = torch.arange(s - t, s)[:, None] - torch.arange(s)[None, :]
    if torch.equal(v, distance >= 0):
        return f"keys up to its own (of {s}; a wider window looks the same)", None
    reach = int(distance[v].max()) + 1 if bool(v.any()) else 0
    if torch.equal(v, (distance >= 0) & (distance < reach)):
        return f"the last {reach} keys, its own included", reach
    if torch.equal(v, distance.abs() < reach):
        return f"keys less than {reach} away on both sides", reach
    own = v.any(0)
    if torch.equal(v, own[None, :].expand_as(v)):
        return "every key that is no padding", None
    if torch.equal(v, own[None, :] & (distance >= 0)):
        return "keys up to its own that are no padding", None
    return "another pattern of keys", None


def sinks_of(reading: Observation, parameters: Sequence[str]) -> str:
    """Returns the columns of the softmax beyond the keys, in words."""
    if reading.beyond is None:
        return ""
    n = reading.beyond.shape[-1]
    named = f" ({', '.join(parameters)})" if parameters else ""
    return f"{n} sink logit{'s' if n > 1 else ''} per head in the softmax{named}"
