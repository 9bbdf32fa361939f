"""Rules that need to know the setting: number format, head width, which norm was configured."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, final

import numpy as np

from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.monitor.alarms.history import History, Place
from qkeel.monitor.alarms.rule import HOLD, Alarm, Rule, Severity, first, largest, peak, trend
from qkeel.monitor.alarms.rules import DEFAULT
from qkeel.monitor.alarms.thresholds import GAIN_FACTOR, IDLE_TOLERANCE, ROUNDING

DECAY_GAINS = (
    'optimizer.register_step_post_hook(lambda o, *_: [p.data.mul_(1 - 0.1 * o.param_groups[0]["lr"]) '
    'for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n])  # decays the gains of the norms'
)
KEEP_FLOAT32 = f"{HOLD}  # or q, k and logits in float32"
SMALLER_EPS = 'for group in optimizer.param_groups: group["eps"] = 1e-15'
LOOK = "print(qkeel.explain_model(model))  # says which norm each attention really applies"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolution(Rule):
    """The rounding of a logit is as large as `tolerance` (nats, standard deviation), so attention ranks noise.

    kernel "fused": q and k are rounded, see metrics.fused_logit_error; "eager": stored scores are, see
    metrics.stored_logit_error (code that rounds the product and again the scaled one is up to √2 worse). Both from
    per-head records. scale: the factor that attention multiplies q·k with, where query_norm and key_norm are those of
    this q and k; 1/√head_dim if not given. Eager needs none: max logits are recorded scaled.
    """

    dtype: Literal["bf16", "fp16"]  #: number format of q and k, or of the scores
    kernel: Literal["fused", "eager"]  #: "eager" writes scores to memory
    head_dim: int  #: d, numbers of one head's query
    scale: float | None = None
    tolerance: float = ROUNDING
    severity: Severity = Severity.ALARM
    source: str = "derived, checked against rounding by torch in tests/monitor; the tolerance is a choice"
    remedy: str = KEEP_FLOAT32
    cause: str = "rounding is as large as the differences between logits"

    @property
    def name(self) -> str:
        """One for each kernel."""
        return f"resolution {self.dtype} {self.kernel}"

    def check(self, history: History) -> Alarm | None:
        worst = self._eager(history) if self.kernel == "eager" else self._fused(history)
        if worst is None or not worst[1] > self.tolerance:
            return None
        at, error, grows = worst
        what = "q and k rounded to" if self.kernel == "fused" else "scores stored in"
        text = f"{what} {self.dtype} move a logit by {error:.2g} nats (standard deviation), over {self.tolerance:g}"
        return self.alarm(history, text, error, at=at, trend=trend(history, grows))

    def _eager(self, history: History) -> tuple[Place, float, np.ndarray] | None:
        top = largest(history, "max_abs_logit") or largest(history, "max_logit")
        return None if top is None else (top.at, stored_logit_error(top.value, self.dtype), top.series)

    def _fused(self, history: History) -> tuple[Place, float, np.ndarray] | None:
        query, key = history.series("query_norm"), history.series("key_norm")
        if query is None or key is None or not len(query) or np.isnan(query[-1] * key[-1]).all():
            return None
        at = peak("query_norm", query[-1] * key[-1])
        product = query[:, at.layer, at.head] * key[:, at.layer, at.head]
        return at, fused_logit_error(float(product[-1]), 1.0, self.head_dim, self.dtype, self.scale), product


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GainGrowth(Rule):
    """The logit bound that the gains of a q/k norm allow (`gain_bound`, nats) grew `factor`-fold since the start. A
    norm with free gains only shifts the growth into them.
    """

    factor: float = GAIN_FACTOR
    severity: Severity = Severity.NOTICE
    source: str = "Qwen3-Next (2025): gains of its q/k norms grew abnormally; zero-centred and decayed since"
    remedy: str = DECAY_GAINS
    cause: str = "the gains of the q/k norm grow"

    def check(self, history: History) -> Alarm | None:
        series, top = history.series("gain_bound"), history.top("gain_bound")
        if series is None or top is None or not len(series):
            return None
        start = series[first(top)]
        ratio = series[-1] / np.where(start > 0, start, np.nan)
        if np.isnan(ratio).all() or not np.nanmax(ratio) > self.factor:
            return None
        at = peak("gain_bound", ratio)
        now, times = float(series[-1, at.layer, at.head]), float(np.nanmax(ratio))
        text = f"the gains of the q/k norm allow logits of {now:,.3g}, {times:.2g} times as much as at the start"
        return self.alarm(history, text, now, at=at, trend=trend(history, series[:, at.layer, at.head]))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdleNorm(Rule):
    """A q/k norm is configured but does not act: the norm of q or k is not what it makes it, or a logit is too large.

    With gains of 1, RMS and layer norm make every head √head_dim long, L2 norm 1 long. This is checked once, when the
    norms are first recorded, and only if the gains are `fresh`, that is still 1: not of a model that was trained
    before. Where `gain_bound` is recorded, a logit above it raises the alarm at any step.
    """

    kind: Literal["rms", "layer", "l2"]  #: the norm that is configured
    head_dim: int  #: d, numbers of one head's query
    sides: tuple[Literal["query", "key"], ...] = ("query", "key")  #: which of q and k it norms
    fresh: bool = True
    tolerance: float = IDLE_TOLERANCE  #: relative deviation that is borne
    severity: Severity = Severity.ALARM
    source: str = "public code: five projects shipped norms that did nothing"
    remedy: str = LOOK
    cause: str = "the q/k norm that is configured does not act"

    def check(self, history: History) -> Alarm | None:
        found = (self._length(history, f"{side}_norm") for side in self.sides if self.fresh)
        return next((alarm for alarm in found if alarm is not None), None) or self._bound(history)

    def _length(self, history: History, name: str) -> Alarm | None:
        series, top = history.series(name), history.top(name)
        if series is None or top is None or np.isfinite(top).sum() != 1 or not np.isfinite(top[-1]):
            return None
        expected = 1.0 if self.kind == "l2" else math.sqrt(self.head_dim)
        at = peak(name, np.abs(series[-1] / expected - 1))
        now = float(series[-1, at.layer, at.head])
        text = f"{self.kind} norm is configured, but {name[:-5]} norms are {now:.3g}, not {expected:.3g}"
        return self.alarm(history, text, now, at=at) if abs(now / expected - 1) > self.tolerance else None

    def _bound(self, history: History) -> Alarm | None:
        bound, logit = history.series("gain_bound"), history.series("max_logit")
        if bound is None or logit is None or bound.shape != logit.shape or not len(bound):
            return None
        ratio = logit[-1] / np.where(bound[-1] > 0, bound[-1], np.nan)
        if np.isnan(ratio).all() or not np.nanmax(ratio) > 1 + self.tolerance:
            return None
        at, times = peak("max_logit", ratio), float(np.nanmax(ratio))
        text = f"{self.kind} norm is configured, but a logit is {times:.3g} times what its gains allow"
        return self.alarm(history, text, times, at=at)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient(Rule):
    """The gradient RMS of a head's query or key weight is under Adam's eps (`grad_over_eps` < 1), twice running.

    Adam changes a weight by lr · m / (√v + eps): with √v = eps by half of what is meant, below it by less and less, so
    the head hardly trains while the rest does. Once may be chance, or a first step through a projection that
    starts at zero.
    """

    severity: Severity = Severity.NOTICE
    source: str = (
        "Wortsman et al. 2023, arXiv 2309.14322: gradient RMS falls with scale and rate toward eps; 4.8B parameters at "
        "rate 0.3 do better with 1e-15 than 1e-8, and diverge with 1e-6"
    )
    remedy: str = SMALLER_EPS
    cause: str = "a query or key weight hardly trains"

    def check(self, history: History) -> Alarm | None:
        series = history.series("grad_over_eps")
        if series is None or len(series) < 2:
            return None
        larger = series[-2:].max(0)  # of the two records; NaN where one was not measured
        if np.isnan(larger).all() or not np.nanmin(larger) < 1:
            return None
        at = peak("grad_over_eps", -larger)
        now = float(series[-1, at.layer, at.head])
        text = f"the gradient RMS of the query or key weight is {now:.2g} times the optimizer's eps"
        return self.alarm(history, text, now, at=at, trend=trend(history, series[:, at.layer, at.head]))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The facts of a run besides its records; None is unknown.

    dtype: what q, k and scores are held in; kernel: "fused" if they are not written to memory; head_dim and scale as
    in Resolution; norm: the q/k norm that was configured, on `sides`; fresh: whether training starts from new weights.
    """

    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    kernel: Literal["fused", "eager"] | None = None
    head_dim: int | None = None
    scale: float | None = None
    norm: Literal["rms", "layer", "l2"] | None = None
    sides: tuple[Literal["query", "key"], ...] = ("query", "key")
    fresh: bool = False


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """The default rules, and those that `setting` says enough for.

    >>> [rule.name for rule in rules_for(Setting(dtype="bf16", kernel="eager", head_dim=64))][-3:]
    ['gain growth', 'vanishing gradient', 'resolution bf16 eager']
    """
    rules: list[Rule] = [*DEFAULT, GainGrowth(), VanishingGradient()]  # these raise nothing where nothing is recorded
    dtype, kernel, head_dim = setting.dtype, setting.kernel, setting.head_dim
    if head_dim is None:
        return tuple(rules)
    if kernel is not None and (dtype == "bf16" or dtype == "fp16"):
        rules.append(Resolution(dtype=dtype, kernel=kernel, head_dim=head_dim, scale=setting.scale))
    if setting.norm is not None:
        rules.append(IdleNorm(kind=setting.norm, head_dim=head_dim, sides=setting.sides, fresh=setting.fresh))
    return tuple(rules)
