"""A few rows of the logits of a call, from which follows what a clip, a cap or another scale would do to its heads."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.functional.norms import wide
from qkeel.functional.statistics import VisibleKeys, softmax_rows
from qkeel.spec.logits import Cap, Softcap

# Rows at most, and numbers of all heads: 16 MB, and a single row of longer sequences.
ROWS, LOGITS = 64, 1 << 22


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitSample:
    """The logits of the last rows of the first sequence of a call.

    products: scale · q·k, before the cap. added: what is added to them, such as biases of positions; None for nothing.
    visible: which keys the rows see; None for all.
    """

    products: Float[Tensor, "h r s"]
    added: Float[Tensor, "#h #r s"] | None
    visible: Bool[Tensor, "#h #r #s"] | None
    cap: Cap

    @classmethod
    @torch.no_grad()
    def of(cls, call: Seen) -> LogitSample | None:
        """The sample of a call; None if its weights are no softmax over its keys, or of one head among several calls."""
        spec, t = call.spec, call.query_shape[1]
        if spec.normalizer.kind != "softmax" or spec.cap.kind == "other":
            return None
        if isinstance(call, ScoresCall):
            if call.sink is not None or call.headless:
                return None
            _, h, _, s = call.logits.shape
        else:
            h, s = call.q.shape[1], call.k.shape[2]
        if not h * s * t:
            return None
        rows = slice(t - min(t, ROWS, max(1, LOGITS // (h * s))), t)
        if isinstance(call, ScoresCall):
            logits, hidden = call.logits[0, :, rows], call.hidden_in(rows)
            # A copy: what the program does to its scores afterwards is not to be seen.
            products = logits.to(wide(logits.dtype), copy=True)
            added = call.bias
            if added is not None:
                added = added[0, :, rows] if added.shape[2] > 1 else added[0]
                products -= added
            visible = None if hidden is None else ~hidden
        else:
            keys = slice(0, s)
            with torch.autocast(call.query_device.type, enabled=False):
                q, k = (x[:1] for x in call.encoded())
                q, added = q[:, :, rows], None
                products = call.scores(q, k, rows, keys)[0]
                if call.is_biased:
                    logits = products
                    products = call.unbiased(q, k, rows, keys)[0]
                    added = logits - products
                visible = call.visible(rows, keys)
        if call.query_mask is not None:
            counted = call.query_mask[:1, None, rows, None]
            visible = counted if visible is None else visible & counted
        return cls(
            products=products,
            added=added,
            visible=None if visible is None else visible[0].expand(-1, -1, s),
            cap=spec.cap,
        )

    def effect(
        self, head: int | None = None, *, factor: float = 1.0, cap: float | None = None
    ) -> str:
        """Words on what multiplying q·k by a factor, or capping the logits, would do to a head, or to the median head;
        "" if that is not known.

        >>> from qkeel.spec import NoCap
        >>> z = torch.tensor([[[0.0, 60.0, 20.0]]])
        >>> sample = LogitSample(products=z, added=None, visible=None, cap=NoCap())
        >>> sample.effect(0, factor=0.05).partition(" and ")[0]
        'take the entropy from 0 to 0.52 nats'
        """
        changed = self.cap if cap is None else Softcap(cap)
        pairs = zip(
            self._measures(head, 1.0, self.cap), self._measures(head, factor, changed)
        )
        # The smallest numbers are rounding.
        entropy, gradient = [
            f"from {round(x, 4):.2g} to {round(y, 4):.2g}" for x, y in pairs
        ]
        if "nan" in entropy + gradient:
            return ""
        whose = "median head's " if head is None else ""
        n = self.products.shape[1]
        return (
            f"take the {whose}entropy {entropy} nats and the gradient that its softmax passes back {gradient} of uniform "
            f"attention ({n} quer{'y' if n == 1 else 'ies'})"
        )

    @torch.no_grad()
    def _measures(
        self, head: int | None, factor: float, cap: Cap
    ) -> tuple[float, float]:
        """The mean entropy, in nats, and the mean `softmax_gradient` of a head, or the medians over heads, if q·k were
        multiplied by a factor and the logits capped; NaN where no row sees two keys."""
        z = factor * self.products
        z = cap.apply(z if self.added is None else z + self.added)[None]
        visible = None if self.visible is None else self.visible[None]
        keys = VisibleKeys(visible, 0, z.shape[-1])
        n_keys = keys.counts(z.shape[2], z.device).expand(z.shape[:3])
        rows = softmax_rows(keys.lower_(keys.blank_(z)), keys)
        is_free = n_keys > 1
        means = [
            (rows[name] * is_free).sum((0, 2)) / is_free.sum((0, 2))
            for name in ("entropy", "softmax_gradient")
        ]
        entropy, gradient = [x.median() if head is None else x[head] for x in means]
        return float(entropy), float(gradient)
