"""The logits of a site's calls, as they were seen and as they are where operators were repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.sites.calls.logit_statistics import Seen
from qkeel.sites.calls.mask_functions import HIDES, PackedCall
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.verify.repeated_operators import Lookup
from qkeel.spec import AttentionCall

_ROWS = 32  # the last of each sequence, which see most keys


def unchanged(x: Tensor) -> Tensor:
    """The tensor itself: nothing was repeated."""
    return x


class RepeatedLogits:
    """Reads the logits [b h t s] of a site's calls, zero where a key is hidden; one tensor for each packed sequence."""

    def __init__(self, calls: Sequence[Seen]) -> None:
        self._headless = isinstance(calls[0], ScoresCall) and calls[0].headless
        self._calls = [part for call in calls for part in (call.parts() if isinstance(call, PackedCall) else [call])]
        self._visible = [_visible(call) for call in self._calls]
        self.visible = [torch.cat(self._visible, 1)] if self._headless else self._visible
        self.tensors = [x for call in self._calls for x in _tensors(call)]

    @torch.no_grad()
    def __call__(self, now: Lookup = unchanged) -> list[Tensor]:
        found = [_logits(call, now).masked_fill(~seen, 0.0) for call, seen in zip(self._calls, self._visible)]
        return [torch.cat(found, 1)] if self._headless else found


def _tensors(call: AttentionCall | ScoresCall) -> list[Tensor]:
    """The tensors that the logits are read from."""
    if isinstance(call, ScoresCall):
        return [call.logits]
    mask = [] if call.mask is None or call.mask.dtype == torch.bool else [call.mask]
    return [call.q, call.k, *mask]


def _rows(call: AttentionCall | ScoresCall) -> slice:
    t = call.query_shape[1]
    return slice(max(0, t - _ROWS), t)


def _visible(call: AttentionCall | ScoresCall) -> Tensor:
    """[b h t s], True where a query sees a key."""
    rows, z = _rows(call), _logits(call, unchanged)
    seen = z.isfinite() & (z > HIDES)
    if isinstance(call, ScoresCall):
        hidden = call.hidden
        return seen if hidden is None else seen & ~(hidden[:, :, rows] if hidden.shape[2] > 1 else hidden)
    visible = call.visible(rows, slice(0, call.k.shape[2]))
    return seen if visible is None else seen & visible


def _logits(call: AttentionCall | ScoresCall, now: Lookup) -> Tensor:
    rows = _rows(call)
    if isinstance(call, ScoresCall):
        z = now(call.logits)[:, :, rows]
        return z.to(wide(z.dtype))
    changed = dataclasses.replace(
        call, q=now(call.q), k=now(call.k), mask=call.mask if call.mask is None else now(call.mask)
    )
    q, k = changed.encoded()
    return changed.scores(q[:, :, rows], k, rows, slice(0, k.shape[2]))
