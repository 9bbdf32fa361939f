"""Rules that need to know the setting: number format, head width, which norm was configured."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, final

import numpy as np

from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.monitor.history import History
from qkeel.monitor.rule import Alarm, Extreme, Rule, Severity, largest, trend

DECAY_GAINS = 'optimizer.param_groups[i]["weight_decay"] = 0.1  # i: the group that holds the gains of q_norm, k_norm'
KEEP_FLOAT32 = 'qkeel.apply("qk_clip:threshold=100", model, optimizer)  # or compute q, k and logits in float32'
LOOK = "qkeel.explain_model(model, batch)  # says which norm each attention really applies"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolution(Rule):
    """The rounding of a logit is as large as `tolerance` (nats, standard deviation), so attention ranks noise.

    kernel "fused": q and k are rounded, see metrics.fused_logit_error; "eager": stored scores are, see
    metrics.stored_logit_error. Both from per-head records.
    """

    dtype: Literal["bf16", "fp16"]
    kernel: Literal["fused", "eager"]
    head_dim: int
    scale: float | None = None
    tolerance: float = 0.25
    severity: Severity = Severity.ALARM
    source: str = "derived, checked against rounding by torch in tests/monitor; the tolerance is a choice"
    remedy: str = KEEP_FLOAT32

    @property
    def name(self) -> str:
        """One for each kernel."""
        return f"resolution {self.dtype} {self.kernel}"

    def check(self, history: History) -> Alarm | None:
        """See the class."""
        worst = self._worst(history)
        if worst is None or not worst[1] > self.tolerance:
            return None
        top, error = worst
        what = "q and k rounded to" if self.kernel == "fused" else "scores stored in"
        text = f"{what} {self.dtype} move a logit by {error:.2g} nats (standard deviation), over {self.tolerance:g}"
        return self.alarm(history, text, error, at=top.at, trend=trend(history, top.series))

    def _worst(self, history: History) -> tuple[Extreme, float] | None:
        if self.kernel == "eager":
            top = largest(history, "max_abs_logit") or largest(history, "max_logit")
            return None if top is None else (top, stored_logit_error(top.value, self.dtype))
        query, key = history.series("query_norm"), history.series("key_norm")
        if query is None or key is None:
            return None
        product = dataclasses.replace(history, heads={"query_norm": query * key})
        top = largest(product, "query_norm")
        if top is None:
            return None
        return top, fused_logit_error(top.value, 1.0, self.head_dim, self.dtype, self.scale)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GainGrowth(Rule):
    """The logit bound that the gains of a q/k norm allow (`gain_bound`, nats) grew `factor`-fold since the start.

    A norm with free gains only moves the growth into them.
    """

    factor: float = 4.0
    severity: Severity = Severity.NOTICE
    source: str = "Qwen3-Next (gains of q/k norm grew abnormally; zero-centred and decayed since): FACTS 13.2"
    remedy: str = DECAY_GAINS

    @property
    def name(self) -> str:
        """One name."""
        return "gain growth"

    def check(self, history: History) -> Alarm | None:
        """See the class."""
        series = history.series("gain_bound")
        if series is None or len(series) < 2:
            return None
        first = np.where(series[0] > 0, series[0], np.nan)
        ratio = dataclasses.replace(history, heads={"gain_bound": series / first})
        top = largest(ratio, "gain_bound")
        if top is None or not top.value > self.factor:
            return None
        now = float(series[-1, top.at.layer, top.at.head])
        text = f"the gains of the q/k norm allow logits of {now:,.3g}, {top.value:.2g} times as much as at the start"
        return self.alarm(history, text, now, at=top.at, trend=trend(history, top.series))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdleNorm(Rule):
    """A q/k norm is configured but does not act: at the first record the norm of q or k is not what it makes it.

    With gains of 1, RMS and layer norm make every head √head_dim long, L2 norm 1 long; gains have not moved yet at the
    first record. Where `gain_bound` is recorded, a logit above it tells at any step.
    """

    kind: Literal["rms", "layer", "l2"]
    head_dim: int
    sides: tuple[Literal["query", "key"], ...] = ("query", "key")
    tolerance: float = 0.05
    severity: Severity = Severity.ALARM
    source: str = "PEERS 3.6: five projects shipped norms that did nothing"
    remedy: str = LOOK

    @property
    def name(self) -> str:
        """One name."""
        return "idle norm"

    def check(self, history: History) -> Alarm | None:
        """See the class."""
        return self._lengths(history) if len(history) == 1 else self._bound(history)

    def _lengths(self, history: History) -> Alarm | None:
        expected = 1.0 if self.kind == "l2" else math.sqrt(self.head_dim)
        for side in self.sides:
            series = history.series(f"{side}_norm")
            if series is None:
                continue
            off = dataclasses.replace(history, heads={f"{side}_norm": np.abs(series / expected - 1)})
            top = largest(off, f"{side}_norm")
            if top is not None and top.value > self.tolerance:
                now = float(series[-1, top.at.layer, top.at.head])
                text = f"{self.kind} norm is configured, but {side} norms are {now:.3g}, not {expected:.3g}"
                return self.alarm(history, text, now, at=top.at)
        return None

    def _bound(self, history: History) -> Alarm | None:
        bound, logit = history.series("gain_bound"), history.series("max_logit")
        if bound is None or logit is None or bound.shape != logit.shape:
            return None
        ratio = dataclasses.replace(history, heads={"max_logit": logit / np.where(bound > 0, bound, np.nan)})
        top = largest(ratio, "max_logit")
        if top is None or not top.value > 1 + self.tolerance:
            return None
        text = f"{self.kind} norm is configured, but a logit is {top.value:.3g} times what its gains allow"
        return self.alarm(history, text, top.value, at=top.at)
