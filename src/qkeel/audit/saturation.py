"""How much of a gradient the softmax of each head passes back, and which layers pass back next to nothing."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.sites.site import AttentionSite

# Of what uniform attention would pass back; a head under it is saturated.
LEAST_SHARE = 1 / 50
# The same where the scale is so many times 1/√head_dim, and is the cause: queries and keys that are normed, with a
# scale of 1 and a head_dim of 128 to 512, pass back 0.10 to 0.22 at initialisation (measured).
LEAST_SHARE_OF_SCALE = 1 / 4
UNUSUAL = 4.0
# Places that no key has.
_UNCOUNTED, _SINK = -(1 << 30), -(1 << 29)


@final
class SoftmaxGradients:
    """Adds up Σ p (1 - p) over the rows of a layer, which sees the weights block by block.

    p (1 - p) is the derivative of a weight p with respect to its logit. Heads that attend to the first key, to a fixed
    key or to a key at a fixed distance, as sinks and previous-token heads do, have as small a sum and are healthy, so it
    is also noted where the largest weight of each row lies.
    """

    def __init__(self, n_heads: int) -> None:
        self._sums = torch.zeros(2, n_heads, dtype=torch.float64)
        self._places: list[list[Tensor]] = []

    def add(
        self, rows: slice, weights: Float[Tensor, "b h r s"], visible: Tensor | None
    ) -> None:
        """Adds some rows with their weights, and which keys they see."""
        b, h, r, s = weights.shape
        n_keys = torch.full((1, 1, 1), s, device=weights.device)
        first = torch.zeros_like(n_keys)
        if visible is not None:
            visible = visible.expand(*visible.shape[:-1], s)
            n_keys, first = visible.sum(-1), visible.to(torch.uint8).argmax(-1)
        passed = (weights - weights.square()).sum(-1)
        is_free = (n_keys > 1) & passed.isfinite()
        uniform = (1 - 1 / n_keys.clamp_min(1)).expand(b, h, r)
        sums = torch.stack([passed.double(), uniform.double()])
        self._sums += sums.masked_fill(~is_free, 0.0).sum((1, 3)).cpu()
        queries = torch.arange(rows.start, rows.stop, device=weights.device)
        key = weights.argmax(-1)
        # A sink without a key is one place for all rows that rest on it.
        at_sink = weights.sum(-1) < 1 / 2
        places = []
        for place in (key, key - queries, key - first):
            place = place.masked_fill(at_sink, _SINK)
            places.append(place.masked_fill(~is_free, _UNCOUNTED).cpu())
        self._places.append(places)

    def shares(self) -> Float[Tensor, " h"]:
        """The sum of each head, divided by its value for uniform attention on the same keys, in [0, 1]; NaN if no row
        sees two keys."""
        return self._sums[0] / self._sums[1]

    def is_positional(self) -> Bool[Tensor, " h"]:
        """Whether most rows of a head have their largest weight at the same place, by its index, its distance or its
        distance from the first key that they see."""
        positional = torch.zeros(self._sums.shape[1], dtype=torch.bool)
        for place in zip(*self._places):
            place = torch.cat(place, 2)
            is_free = place != _UNCOUNTED
            # The most frequent place of each sample and head; rows that do not count stand apart.
            apart = torch.arange(place.shape[2]) - 2 * _UNCOUNTED
            common = torch.where(is_free, place, apart).mode(-1, keepdim=True).values
            n_common = (place == common).sum((0, 2))
            positional |= n_common > is_free.sum((0, 2)) / 2
        return positional

    def saturated(self, scale: float) -> tuple[int, ...]:
        """The heads that pass back too little, and whose largest weights follow what is in the keys.

        scale: the factor on q·k times √head_dim; NaN if it is not known.
        """
        least = LEAST_SHARE if not scale >= UNUSUAL else LEAST_SHARE_OF_SCALE
        is_saturated = (self.shares() < least) & ~self.is_positional()
        return tuple(is_saturated.nonzero().flatten().tolist())


def saturation_line(site: AttentionSite | None, scale: float, spread: float) -> str:
    """The line that brings the logits of a saturated layer back to where softmax has a gradient.

    Args:
        site: the layer, if its weights are known.
        scale: the factor on q·k times √head_dim; NaN if it is not known.
        spread: how far the largest logit of a row lies from the row's mean, in nats.
    """
    is_unusual = scale >= UNUSUAL
    factor = 1 / scale if is_unusual else 10 / spread
    said = f"its scale is {scale:.3g} times 1/√head_dim: " if is_unusual else ""
    gains = [] if site is None else list(site.query_gains)
    if gains and all(gain.parameter and not gain.offset for gain in gains):
        ends = sorted({".".join(str(x.parameter).split(".")[-2:]) for x in gains})
        return (
            f"{said}[p.data.mul_({factor:.3g}) for n, p in model.named_parameters() if n.endswith({tuple(ends)!r})]  # "
            "the gain of q"
        )
    if site is not None and not gains and not is_unusual:
        return 'qkeel.apply(model, "qk_norm", batch=batch)  # a norm with a gain'
    return f"{said}multiply the scale, or the gain of q, by {factor:.3g}"
