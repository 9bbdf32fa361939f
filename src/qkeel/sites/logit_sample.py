"""A few rows of the logits of a call, from which follows what a clip, a cap or another scale would do to its heads."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.functional.statistics import VisibleKeys, softmax_rows
from qkeel.spec.logits import Cap, Softcap

# Rows at most, and numbers of all heads: 16 MB, and a single row of longer sequences.
ROWS, LOGITS = 64, 1 << 22


class LogitSample(NamedTuple):
    """The logits [1 h r s] of the last rows of the first sequence of a call.

    logits: before the cap. products: scale · q·k, which are the logits less biases and masks of numbers. keys: which of
    them the rows see. cap: the cap of the call.
    """

    logits: Tensor
    products: Tensor
    keys: VisibleKeys
    cap: Cap

    @classmethod
    @torch.no_grad()
    def of(cls, call: Seen) -> LogitSample | None:
        """The sample of a call; None if its weights are no softmax over its keys, or of one head among several calls."""
        _, h, t, s = call.scores_shape
        if call.spec.normalizer.kind != "softmax" or not h * s * t:
            return None
        rows = slice(t - min(t, ROWS, max(1, LOGITS // (h * s))), t)
        if isinstance(call, ScoresCall):
            if call.sink is not None or call.headless:
                return None
            call = dataclasses.replace(call, logits=call.logits[:1])
        keys = slice(0, s)
        with torch.autocast(call.query_device.type, enabled=False):
            q, k = call.encoded()
            block = q[:1, :, rows], k[:1], rows, keys
            logits = products = call.scores(*block)
            if call.is_biased:
                products = call.unbiased(*block)
        visible = call.visible(rows, keys)
        if call.query_mask is not None:
            counted = call.query_mask[:, None, rows, None]
            visible = counted if visible is None else visible & counted
        if visible is not None:
            visible = visible[:1].expand(-1, -1, -1, s)
        return cls(logits[:1], products[:1], VisibleKeys(visible, 0, s), call.spec.cap)

    @torch.no_grad()
    def effect(
        self, head: int, *, factor: float = 1.0, cap: float | None = None
    ) -> str:
        """Words on what multiplying q·k by a factor, or capping the logits, would do to a head; "" if that is not known.

        >>> from qkeel.spec import NoCap
        >>> z = torch.tensor([[[[0.0, 60.0, 20.0]]]])
        >>> sample = LogitSample(z, z, VisibleKeys(None, 0, 3), NoCap())
        >>> sample.effect(0, factor=0.05).partition(" and ")[0]
        'take the entropy from 0 to 0.52 nats'
        """
        changed = self.logits + (factor - 1) * self.products
        changed = (self.cap if cap is None else Softcap(cap)).apply(changed)
        numbers = []
        for z in (self.cap.apply(self.logits), changed):
            z = self.keys.lower_(self.keys.blank_(z.clone()))
            is_free = self.keys.counts(z.shape[2], z.device).expand(z.shape[:3]) > 1
            rows = softmax_rows(z, self.keys)
            # The smallest numbers are rounding.
            numbers += [
                f"{round(float(rows[name][0, head][is_free[0, head]].mean()), 4):.2g}"
                for name in ("entropy", "softmax_gradient")
            ]
        if "nan" in numbers:
            return ""
        return (
            "take the entropy from {0} to {2} nats and the gradient that its softmax passes back from {1} to {3} of uniform "
            "attention (last {4} queries)"
        ).format(*numbers, self.logits.shape[2])
