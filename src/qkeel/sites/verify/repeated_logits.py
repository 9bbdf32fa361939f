"""The logits of a site's calls, as they were seen and as they are where operators were repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.sites.calls.logit_statistics import Seen
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.verify.repeated_operators import Lookup
from qkeel.spec import AttentionCall

_ROWS = 32  # enough to see a head's logits move


def unchanged(x: Tensor) -> Tensor:
    """The tensor itself: nothing was repeated."""
    return x


class RepeatedLogits:
    """Reads the logits [b h t s] of a site's calls, NaN where a key is hidden."""

    def __init__(self, calls: Sequence[Seen]) -> None:
        self._headless = isinstance(calls[0], ScoresCall) and calls[0].headless
        self._calls = calls
        self.tensors = [x for call in self._calls for x in _tensors(call)]
        self._rows = [_rows(call) for call in self._calls]

    @torch.no_grad()
    def __call__(self, now: Lookup = unchanged) -> list[Tensor]:
        found = [_logits(call, rows, now) for call, rows in zip(self._calls, self._rows)]
        return [torch.cat(found, 1)] if self._headless else found


def _tensors(call: AttentionCall | ScoresCall) -> list[Tensor]:
    """The tensors that the logits are read from."""
    if isinstance(call, ScoresCall):
        return [call.logits]
    mask = [] if call.mask is None or call.mask.dtype == torch.bool else [call.mask]
    return [call.q, call.k, *mask]


@torch.no_grad()
def _rows(call: AttentionCall | ScoresCall) -> slice:
    """The last rows or the first, whichever have more logits: some are of padding."""
    t = call.query_shape[1]
    last, first = slice(max(0, t - _ROWS), t), slice(0, min(t, _ROWS))
    return max(last, first, key=lambda rows: int(_logits(call, rows, unchanged).nan_to_num(0.0).count_nonzero()))


def _logits(call: AttentionCall | ScoresCall, rows: slice, now: Lookup) -> Tensor:
    if isinstance(call, ScoresCall):
        z = now(call.logits)[:, :, rows]
        z, visible = z.to(wide(z.dtype)), None
        if call.hidden is not None:
            visible = ~(call.hidden[:, :, rows] if call.hidden.shape[2] > 1 else call.hidden)
    else:
        mask = call.mask if call.mask is None else now(call.mask)
        changed = dataclasses.replace(call, q=now(call.q), k=now(call.k), mask=mask)
        q, k = changed.encoded()
        keys = slice(0, k.shape[2])
        z, visible = changed.scores(q[:, :, rows], k, rows, keys), changed.visible(rows, keys)
    seen = z.isfinite() & (z > torch.finfo(call.logits.dtype if isinstance(call, ScoresCall) else call.q.dtype).min / 2)
    return z.masked_fill(~(seen if visible is None else seen & visible), torch.nan)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """|b - a|, zero where a key is hidden in either."""
    return (b - a).abs().nan_to_num(0.0)
