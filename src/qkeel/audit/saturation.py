"""Which layers pass back next to no gradient, because the softmax of most heads gives all weight to one key."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.sites.site import AttentionSite, is_normed

# Of what uniform attention on the same keys would pass back, Σ p (1 - p); a head under it is saturated.
LEAST_GRADIENT = 1 / 50
# The same where the scale is so many times 1/√head_dim, and is the cause: random queries and keys that are normed, with
# a scale of 1 and a head_dim of 128 to 512, pass back 0.04 to 0.25 on 16 to 512 keys (measured).
LEAST_GRADIENT_OF_SCALE = 1 / 4
UNUSUAL = 4.0
# Places that no key has.
_UNCOUNTED, _SINK = -(1 << 30), -(1 << 29)


@final
class LargestWeights:
    """Notes where the largest weight of each row lies, of a layer whose weights are seen block by block.

    Heads that attend to the first key, to a fixed key or to a key at a fixed distance, as sinks and previous-token
    heads do, pass back as little as saturated ones, and are healthy.
    """

    def __init__(self) -> None:
        self._places: list[list[Tensor]] = []

    def add(
        self, rows: slice, weights: Float[Tensor, "b h r s"], visible: Tensor | None
    ) -> None:
        """Adds some rows with their weights, and which keys they see."""
        s = weights.shape[3]
        n_keys = torch.full((1, 1, 1), s, device=weights.device)
        first = torch.zeros_like(n_keys)
        if visible is not None:
            visible = visible.expand(*visible.shape[:-1], s)
            # torch has no argmax of booleans; of equal numbers it returns the first.
            n_keys, first = visible.sum(-1), visible.to(torch.uint8).argmax(-1)
        total = weights.sum(-1)
        is_free = (n_keys > 1) & total.isfinite()
        queries = torch.arange(rows.start, rows.stop, device=weights.device)
        key = weights.argmax(-1)
        places = []
        for place in (key, key - queries, key - first):
            # A sink without a key is one place for all rows that rest on it.
            place = place.masked_fill(total < 1 / 2, _SINK)
            places.append(place.masked_fill(~is_free, _UNCOUNTED).cpu())
        self._places.append(places)

    def are_positional(self) -> Bool[Tensor, " h"]:
        """Whether most rows of a head have their largest weight at the same place, by its index, its distance or its
        distance from the first key that they see."""
        by_measure = []
        for place in zip(*self._places):
            place = torch.cat(place, 2)
            is_free = place != _UNCOUNTED
            # The most frequent place of each sample and head; rows that do not count stand apart.
            apart = torch.arange(place.shape[2]) - 2 * _UNCOUNTED
            common = torch.where(is_free, place, apart).mode(-1, keepdim=True).values
            n_common = (place == common).sum((0, 2))
            by_measure.append(n_common > is_free.sum((0, 2)) / 2)
        return torch.stack(by_measure).any(0)


def least_gradient(scale: float) -> float:
    """The `softmax_gradient` under which a head is saturated, by the factor on q·k times √head_dim; NaN if not known.

    >>> least_gradient(1.0), least_gradient(16.0)
    (0.02, 0.25)
    """
    return LEAST_GRADIENT_OF_SCALE if scale >= UNUSUAL else LEAST_GRADIENT


def saturation_line(
    site: AttentionSite | None, scale: float, spread: float
) -> tuple[str, float]:
    """The line that brings the logits of a saturated layer back to where softmax has a gradient, and its factor on them,
    NaN for a norm.

    Args:
        site: the layer, if its weights are known.
        scale: the factor on q·k times √head_dim; NaN if it is not known.
        spread: how far the largest logit of a row lies from the row's mean, in nats.
    """
    is_unusual = scale >= UNUSUAL
    factor = 1 / scale if is_unusual else 10 / spread
    remark = f"its scale is {scale:.3g} times 1/√head_dim: " if is_unusual else ""
    gains = [] if site is None else list(site.query_gains)
    if gains and not any(gain.offset for gain in gains):
        ends = sorted({".".join(x.parameter.split(".")[-2:]) for x in gains})
        line = (
            f"[p.data.mul_({factor:.3g}) for n, p in model.named_parameters() if n.endswith({tuple(ends)!r})]  # the gain "
            "of q"
        )
    elif site is not None and not is_normed(site) and not is_unusual:
        return (
            'qkeel.apply(model, "qk_norm", batch=batch)  # a norm with a gain',
            math.nan,
        )
    else:
        line = f"multiply the scale, or the gain of q, by {factor:.3g}"
    return remark + line, factor
