"""Rules that raise alarms based on records."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, final

import numpy as np

from qkeel.metrics.verdict import bound_signs, judged_logits
from qkeel.monitor import thresholds
from qkeel.monitor.finite_stages import (
    LOGITS,
    OUTPUT,
    PRODUCTS,
    WEIGHTS,
    Facts,
    Origin,
    first_origin,
)
from qkeel.monitor.forecast import Forecast, clock, forecast
from qkeel.monitor.history import History, RecordPlace
from qkeel.options import settle
from qkeel.records import NON_FINITE, fold_heads

# Alarms and rules; a rule is a condition on records and has no state.

HOLD = 'qkeel.apply(model, "qk_clip:threshold=15,steps=matched", optimizer)'
# No clip and no cap mends an infinite logit: a number overflowed before.
FIND_NON_FINITE = (
    "print([n for n, p in model.named_parameters() if not p.isfinite().all()])  # in the last checkpoint before "
    "this step; if there are none, look at the batch, the loss scale and the norms"
)
TRACE_NAN = (
    "qkeel.watch(model, optimizer, nan=True)  # from the last checkpoint before this step: names the module, sample and "
    "channel"
)
SEE_A_KEY = (
    "mask = mask | ~mask.any(-1, keepdim=True)  # True where a key is seen: a row that sees none then sees all, which "
    "is finite"
)
LOWER_RATE = 'for group in optimizer.param_groups: group["lr"] *= 0.1'
# What alarms judge, in words.
WORDS = {"logit_spread": "logit spread", "max_logit": "max logit"}
# What most alarms are about.
GROWTH = "attention logits have grown too large"


class Severity(StrEnum):
    """The three severity levels of an alarm.

    NOTICE: worth knowing, but it also occurs in healthy runs. ALARM: without action, the loss suffers. CRITICAL: runs
    do not recover from this.

    >>> [str(severity) for severity in Severity]
    ['notice', 'alarm', 'critical']
    """

    NOTICE = "notice"
    ALARM = "alarm"
    CRITICAL = "critical"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A reason to act: where it occurred, the value and its growth, and the line of code that helps.

    `rule` is the name of the rule, `severity` notice, alarm or critical, `step` the optimizer step. `value` is the
    number that the rule judged, in the unit of its field (nats for logits and entropies). `meaning` and `trend`
    describe the alarm in words, `remedy` is the line of code, and `source` states where the threshold comes from.
    `layer` and `head` are None if the rule is about the whole model; `head` is None if it is about a whole layer.
    `cause` says in words what is going wrong; alarms with the same cause belong together and have the same remedy.
    `effect` says what the remedy would do to the head, if logits of a recent call were kept.

    >>> alarm = Alarm(rule="ceiling", severity=Severity.ALARM, step=40, value=120.0, meaning="max logit 120", trend="",
    ...     remedy="", source="", layer="attn", head=1)
    >>> alarm.line
    'alarm at step 40, attn, head 1: max logit 120'
    """

    rule: str
    severity: Severity
    step: int
    value: float
    meaning: str
    trend: str
    remedy: str
    source: str
    layer: str | None = None
    head: int | None = None
    cause: str = ""
    effect: str = ""

    @property
    def heading(self) -> str:
        """Its severity, step, layer and head."""
        heading = f"{self.severity} at step {self.step:,}"
        if self.layer is not None:
            heading += f", {self.layer or 'the model itself'}"
            heading += "" if self.head is None else f", head {self.head}"
        return heading

    @property
    def line(self) -> str:
        """States what was observed, where and when, but not what to do about it."""
        words = "; ".join(filter(None, [self.meaning, self.trend, self.effect]))
        return f"{self.heading}: {words}"

    def __str__(self) -> str:
        """One line that says what was observed and what to do."""
        return f"{self.line}. To act: {self.remedy}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule(abc.ABC):
    """A condition on the history of a run; `source` says where its thresholds come from."""

    severity: Severity = Severity.ALARM  #: severity of its alarms
    source: str = ""  #: paper, page or derivation, in words
    remedy: str = HOLD  #: the line of code that an alarm recommends
    #: what goes wrong; alarms with the same cause are reported together
    cause: str = GROWTH
    forecasts: ClassVar[bool] = False  #: whether its alarms say what will happen

    @property
    def name(self) -> str:
        """The name of the rule, by default the words of its class's name; at most one alarm is raised per name and
        run."""
        return re.sub("(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()

    @abc.abstractmethod
    def check(self, history: History) -> Alarm | None:
        """Returns an alarm if the last record warrants one."""

    def alarm(
        self,
        history: History,
        meaning: str,
        value: float,
        *,
        at: RecordPlace | None = None,
        trend: str = "",
    ) -> Alarm:
        """Returns the alarm for the last record."""
        layer, head = (None, None) if at is None else history.where(at)
        limit = history.limits.get(layer or "")
        remedy = self.remedy
        if at is not None and at.name in WORDS:
            if limit is not None:
                meaning += f", with {limit.remedy} active"
            bound = remedy_bound(remedy)
            if bound is not None and at.head is not None:
                remedy = _beside_a_constant(
                    remedy, signs(history, *bound)[at.layer, at.head]
                )
        return Alarm(
            rule=self.name,
            severity=self.severity,
            step=int(history.steps[-1]),
            value=value,
            meaning=meaning,
            trend=trend,
            remedy=FIND_NON_FINITE if math.isinf(value) else remedy,
            source=self.source,
            layer=layer,
            head=head,
            cause=self.cause,
        )


def check_options(rule: Rule) -> None:
    """Checks the numbers of a rule against their annotations."""
    settle(rule, f"the rule {type(rule).__name__}")


def measured(history: History, name: str) -> np.ndarray:
    """Returns [n layers heads] of a name, at least one record; NaN, which is over no threshold, if it was not
    recorded."""
    series = history.series(name)
    if series is None or not len(series):
        return np.full((max(len(history), 1), 1, 1), np.nan)
    return series


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extreme:
    """The largest entry of the last record: its place, its value, and the numbers [n layers heads] among which it is,
    spreads of logits as a rule (see `judged_series`)."""

    at: RecordPlace
    value: float
    judged: np.ndarray

    def __str__(self) -> str:
        """What is judged, and its value, as "logit spread 120"."""
        return f"{WORDS[self.at.name]} {self.value:,.4g}"

    @property
    def series(self) -> np.ndarray:
        """[n], the numbers of this head."""
        return self.at.of(self.judged)

    @property
    def envelope(self) -> np.ndarray:
        """[n], the largest number of each record, which is smoother than the series of one head."""
        rows = self.judged.reshape(len(self.judged), -1)
        return np.fmax.reduce(rows, axis=1, initial=np.nan)


# A History never changes, and most rules need the same entry.
@functools.lru_cache(maxsize=4)
def judged_series(history: History) -> np.ndarray | None:
    """Returns [n layers heads], the spreads of the logits, or the largest ones where no spread was recorded; see
    `judged_logits`."""
    names = ("max_logit", "capped_max_logit", "logit_spread")
    logits, capped, spreads = map(history.series, names)
    if logits is None or not len(logits):
        return None
    same = [
        x if x is None or x.shape == logits.shape else None for x in (capped, spreads)
    ]
    return judged_logits(logits, *same)


_BOUND = re.compile(r"(qk_clip:threshold|softcap:cap)=([\d.]+)")


def remedy_bound(remedy: str) -> tuple[float, bool] | None:
    """The threshold of the clip, or the cap, in a line of code, and whether it is a cap; None if there is neither.

    >>> remedy_bound('qkeel.apply(model, "softcap:cap=50", optimizer)')
    (50.0, True)
    """
    bound = _BOUND.search(remedy)
    return None if bound is None else (float(bound[2]), bound[1].startswith("softcap"))


def signs(history: History, bound: float, caps: bool = False) -> np.ndarray:
    """Returns [layers heads], what a clip or a cap would do to each head in the last record; see `bound_signs`."""
    logits, spreads = (measured(history, x)[-1] for x in ("max_logit", "logit_spread"))
    return bound_signs(logits, spreads, bound, caps=caps)


def _beside_a_constant(remedy: str, sign: int) -> str:
    """The line for a head that a clip or cap would flatten or not reach, by its sign: lower rates of its weights, or of
    the optimizer where its steps are not scaled."""
    spec = re.search(r'"[^"]*(?:qk_clip|softcap)[^"]*"', remedy)
    if not sign or spec is None:
        return remedy
    is_scaled = "matched" in spec.group() or "lalr" in spec.group()
    line = remedy.replace(spec.group(), '"lalr:tau=0.1"') if is_scaled else LOWER_RATE
    why = (
        "would act on the constant that makes up its largest logit"
        if sign > 0
        else "would not act, as its largest logit is low"
    )
    return f"{line}  # a clip or cap {why}"


def widest_spread(
    history: History, *, threshold: float = 0.0, factor: float = 0.0
) -> Extreme | None:
    """The head whose logits spread most in the last record, where NaN counts as not measured.

    threshold, factor: heads that cannot reach this logit, or this multiple of theirs, are left out, because an active
    clip or cap holds them below. A clip acts after a step, so a logit may be over its bound; at more than LOOSE times
    the bound, the clip does not hold it.
    """
    # Without a clip or cap, all rules ask for the same head.
    if not history.limits:
        threshold = factor = 0.0
    return _widest_spread(history, threshold, factor)


@functools.lru_cache(maxsize=4)
def _widest_spread(history: History, threshold: float, factor: float) -> Extreme | None:
    judged = judged_series(history)
    if judged is None:
        return None
    if history.limits:
        limits = [history.limits.get(layer) for layer in history.layers]
        bounds = np.array([np.inf if x is None else x.bound for x in limits])[:, None]
        last = judged[-1]
        # Infinity times 0 is NaN, which is not over a bound.
        with np.errstate(invalid="ignore"):
            over = np.maximum(threshold, factor * last) > bounds
        held = (last <= LOOSE * bounds) & over
        judged = np.where(held, np.nan, judged)
    if np.isnan(judged[-1]).all():
        return None
    at = peak("logit_spread", judged[-1])
    if np.isnan(measured(history, "logit_spread")[-1]).all():
        at = dataclasses.replace(at, name="max_logit")
    return Extreme(at=at, value=float(at.of(judged)[-1]), judged=judged)


def peak(name: str, record: np.ndarray) -> RecordPlace:
    """The place where one record [layers heads] is largest; at least one entry must be a number."""
    # Not nanargmax, which calls eighteen functions of Python in each rule of each step.
    largest = np.fmax.reduce(record, axis=None)
    layer, head = divmod(int((record == largest).argmax()), record.shape[1])
    return RecordPlace(name, layer, head)


def ahead(history: History, values: np.ndarray, threshold: float) -> Forecast | None:
    """Forecasts when `values` [n], a series of this history, will pass `threshold`; see `forecast`."""
    return forecast(
        history.steps, values, threshold, rates=history.rates, planned=history.planned
    )


def first(series: np.ndarray) -> int:
    """The index of the first record in which a series [n …] was measured, because a name may appear late."""
    tops = np.fmax.reduce(series.reshape(len(series), -1), axis=1, initial=np.nan)
    return int(np.argmax(np.isfinite(tops)))


def trend(
    history: History, values: np.ndarray, of: str = "it", *, grows: bool = True
) -> str:
    """Describes the growth of a value in words: its first value and, if it `grows` freely, the factor by which it grows
    each time the training length, measured as the sum of learning rates, doubles; "" if the last record is the first
    that contains the value."""
    start = first(values)
    if start == len(values) - 1:
        return ""
    was = f"{of} was {values[start]:.3g} at step {int(history.steps[start]):,}"
    growth = ahead(history, values, 10 * float(values[-1])) if values[-1] > 0 else None
    if growth is None or not grows:
        return was
    return f"{was}, and it grows by a factor of {2**growth.exponent:.2g} each time the training length doubles"


# Alarm rules on logits and entropy.
#
# A rule reads all records so far and decides whether the last one is a reason for an alarm. How early each rule fires,
# and how often without a reason, is measured in experiments/notes/alarms.md. The thresholds are in thresholds.py.

# Logits of at most this size differ too little for a weight to become 0 in float32.
_FEW_NATS = 40.0
# Times its bound, up to which a clip counts as holding a head: the steps between its actions are short.
LOOSE = 2.0
# The series that forecasts use; an alarm names the head that is now largest.
_MODEL = "the largest of all heads"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling(Rule):
    """A head's largest attention logit exceeds `threshold` (nats).

    >>> Ceiling(threshold=100.0).severity
    <Severity.ALARM: 'alarm'>
    """

    threshold: float

    __post_init__ = check_options

    @property
    def name(self) -> str:
        """The rule's name followed by the threshold: each threshold is a separate rule."""
        return f"ceiling {self.threshold:g}"

    def check(self, history: History) -> Alarm | None:
        top = widest_spread(history)
        if top is None or not top.value > self.threshold:
            return None
        meaning = f"{top} is over {self.threshold:,g}"
        free = widest_spread(history, factor=LOOSE)
        grows = free is not None and free.at == top.at
        course = trend(history, top.series, grows=grows)
        return self.alarm(history, meaning, top.value, at=top.at, trend=course)


def _passes_soon(
    history: History, threshold: float, floor: float, horizon: float
) -> Forecast | None:
    """Returns when the largest logit, which is over `floor`, passes a threshold, if that is within `horizon` times the
    training so far."""
    top = widest_spread(history, threshold=threshold)
    if top is None or not top.value > floor:
        return None
    passing = ahead(history, top.envelope, threshold)
    is_soon = passing and passing.step <= horizon * float(history.steps[-1])
    return passing if is_soon else None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth(Rule):
    """The largest logit is over `floor` and will be `factor` times as large within `horizon` times the training so far.

    The power law of `forecast` must predict such growth at the last record and at the record before it, so that one
    unusual batch does not raise an alarm. The forecast is for the largest logit over all heads, because this series is
    smoother than that of a single head, and its intervals are accurate (experiments/notes/alarms.md). The alarm names
    the head that currently has the largest logit.

    >>> Growth(floor=50.0).factor
    3.0
    """

    forecasts: ClassVar[bool] = True
    floor: float = thresholds.GROWTH_FLOOR
    factor: float = thresholds.GROWTH_FACTOR
    horizon: float = thresholds.HORIZON
    source: str = "experiments/notes/alarms.md: chosen on the tuning seeds there, measured on others"

    def check(self, history: History) -> Alarm | None:
        top, passing = self._growth(history)
        if top is None or passing is None:
            return None
        if self._growth(history.upto(len(history) - 1))[1] is None:
            return None
        meaning = (
            f"{top} will be {self.factor:g} times as large by step {passing.step:,.0f}"
        )
        course = trend(history, top.envelope, _MODEL)
        return self.alarm(history, meaning, top.value, at=top.at, trend=course)

    def _growth(self, history: History) -> tuple[Extreme | None, Forecast | None]:
        """Returns the largest logit of the last record, and when it will be `factor` times as large, if soon."""
        top = widest_spread(history, factor=self.factor)
        if top is None:
            return None, None
        larger = self.factor * top.value
        return top, _passes_soon(history, larger, self.floor, self.horizon)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Approach(Rule):
    """Fires when the largest logit is over `floor` and will pass `threshold` within `horizon` times the training so
    far.

    Logits are in nats. The forecast is a power law of the sum of learning rates (experiments/notes/alarms.md).

    >>> Approach(threshold=1000.0).horizon
    4.0
    """

    forecasts: ClassVar[bool] = True
    threshold: float
    floor: float = thresholds.APPROACH_FLOOR
    horizon: float = thresholds.HORIZON

    __post_init__ = check_options

    @property
    def name(self) -> str:
        """The rule's name followed by the threshold: each threshold is a separate rule."""
        return f"forecast {self.threshold:g}"

    def check(self, history: History) -> Alarm | None:
        top = widest_spread(history, threshold=self.threshold)
        passing = _passes_soon(history, self.threshold, self.floor, self.horizon)
        if top is None or passing is None:
            return None
        meaning = f"{top} {passing}"
        course = trend(history, top.envelope, _MODEL)
        return self.alarm(history, meaning, top.value, at=top.at, trend=course)


def outgrowing(
    history: History,
    logits: np.ndarray,
    threshold: float,
    *,
    floor: float = thresholds.OUTLOOK_FLOOR,
    factor: float = thresholds.OUTLOOK_FACTOR,
) -> np.ndarray:
    """True for logits [n …] over `floor` and over `factor` times what they were, which end over `threshold` if they go
    on growing in proportion to the sum of learning rates.

    If no schedule is known, or if the run does not follow it, the end is at four times the current sum.
    """
    start = first(logits)
    earliest, latest = logits[start], logits[-1]
    planned = history.planned
    if planned is not None and planned.followed(history.steps, history.rates):
        ticks, end = planned.ticks(history.steps), float(planned.clock[-1])
    else:
        ticks = clock(history.steps, history.rates)
        end = thresholds.HORIZON * float(ticks[-1])
    passed = float(ticks[-1] - ticks[start])
    left = (end - float(ticks[-1])) / passed if passed > 0 else 0.0
    has_grown = (latest > floor) & (latest > factor * earliest)
    return has_grown & ~(latest + (latest - earliest) * left <= threshold)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outlook(Rule):
    """The largest logit will exceed `threshold` at the end of the planned schedule if its growth continues.

    The logit z is extrapolated in proportion to the clock c, the sum of learning rates, since the first record: z_end =
    z + (z - z_0) (c_end - c) / (c - c_0). The rule applies as soon as z exceeds both `floor` and `factor` times z_0, so
    it can fire during the warm-up, whose low rates have had little of the effect that the peak rate will have. The rule
    does not fire if no schedule is known. It does not fit a power law, because so early in a run the first points still
    reflect the logit before training.

    >>> Outlook(threshold=200.0).factor
    2.0
    """

    threshold: float = thresholds.OUTLOOK
    floor: float = thresholds.OUTLOOK_FLOOR
    factor: float = thresholds.OUTLOOK_FACTOR
    source: str = "experiments/notes/alarms.md: chosen on the tuning seeds there, measured on others"

    __post_init__ = check_options

    def check(self, history: History) -> Alarm | None:
        planned = history.planned
        top = widest_spread(history, threshold=self.threshold)
        if planned is None or top is None or not np.isfinite(top.value):
            return None
        if not planned.followed(history.steps, history.rates):
            return None
        latest, envelope = top.value, top.envelope
        if not outgrowing(
            history, envelope, self.threshold, floor=self.floor, factor=self.factor
        ):
            return None
        meaning = (
            f"{top}: if it keeps growing with the planned learning rates, "
            f"it will end over {self.threshold:,g}"
        )
        course = trend(history, envelope, _MODEL)
        return self.alarm(history, meaning, latest, at=top.at, trend=course)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EntropyCollapse(Rule):
    """The mean entropy of a layer's heads is below `threshold` (nats), so that attention picks one key and has no
    gradient.

    The rule applies to layers rather than heads, because healthy models have heads that attend to one key. The
    threshold is half of the value below which a whole model counts as collapsed, because single layers reach 0.1 in
    runs that end only slightly worse (experiments/notes/alarms.md).

    >>> EntropyCollapse().threshold
    0.05
    """

    threshold: float = thresholds.ENTROPY
    source: str = "Zhai et al. 2023, arXiv 2303.06296 (entropy collapse); threshold: experiments/notes/alarms.md, tuning seeds"

    __post_init__ = check_options

    def check(self, history: History) -> Alarm | None:
        series = measured(history, "entropy")
        if np.isnan(series[-1]).all():
            return None
        ends = [first(series), -1]
        heads = series[ends].astype(np.float64)
        heads[_one_key(history, ends, heads)] = np.nan
        means = fold_heads("entropy", heads)
        if np.isnan(means[1]).all():
            return None
        layer = int((means[1] == np.fmin.reduce(means[1])).argmax())
        low = float(means[1, layer])
        if not low < self.threshold:
            return None
        meaning = (
            f"the layer's mean attention entropy, {low:.3g} nats, is under {self.threshold:g}: "
            "one key takes all the attention"
        )
        course = f"it was {means[0, layer]:.3g} in the first record"
        if len(history) == 1:
            course = ""
        place = RecordPlace("entropy", layer, None)
        return self.alarm(history, meaning, low, at=place, trend=course)


def _one_key(
    history: History, records: Sequence[int], entropy: np.ndarray
) -> np.ndarray:
    """Returns whether each query of a head sees only one key, in these records.

    If all statistics are measured, the normalized entropy is then missing, because it covers only queries with two or
    more keys. If only the entropy is measured, an entropy of exactly 0 together with small logits reveals it, because
    exp(z) of a second key does not vanish in float32 if the gap is below 88.
    """

    some, every, top = (
        measured(history, name)[records]
        for name in ("normalized_entropy", "mean_logit", "max_logit")
    )
    is_zero = (entropy == 0) & (np.abs(top) < _FEW_NATS)
    return ~np.isfinite(some) & (np.isfinite(every) | is_zero)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite(Rule):
    """A number of a layer is NaN or infinite: its input, queries, keys, logits or output. The alarm names between what
    this began (see `records.STAGES`), and not the layers that inherit it.

    If a finite logit was over 100 before, and logits are the first to overflow, growth is the likely cause, and the
    alarm has the cause and the remedy of growth.

    >>> NonFinite().cause
    'numbers of attention are NaN or infinite'
    """

    severity: Severity = Severity.CRITICAL
    source: str = "by definition"
    remedy: str = FIND_NON_FINITE
    cause: str = "numbers of attention are NaN or infinite"
    facts: Facts = dataclasses.field(default_factory=Facts)

    @property
    def name(self) -> str:
        """The name of the rule."""
        return "not finite"

    def check(self, history: History) -> Alarm | None:
        origin = first_origin(history, self.facts)
        if origin is None:
            return self._of_logits(history)
        place = RecordPlace("finite_stages", origin.layer, origin.head)
        meaning = f"NaN or infinity began {origin.meaning}"
        alarm = self.alarm(history, meaning, np.nan, at=place)
        if origin.stage in (PRODUCTS, LOGITS):
            alarm = self._after_growth(history, alarm)
        if alarm.remedy == FIND_NON_FINITE:
            alarm = dataclasses.replace(alarm, remedy=_look(origin))
        return alarm

    def _of_logits(self, history: History) -> Alarm | None:
        """The alarm of records that hold no more than whether logits are finite."""
        is_broken = measured(history, NON_FINITE)[-1] > 0
        if not is_broken.any():
            return None
        broken = np.argwhere(is_broken)
        n = len(broken)
        heads = "this head" if n == 1 else f"{n} heads (this is the first)"
        meaning = f"the logits of {heads} are NaN or infinite"
        place = RecordPlace(NON_FINITE, *map(int, broken[0]))
        alarm = self.alarm(history, meaning, np.nan, at=place)
        return self._after_growth(history, alarm)

    def _after_growth(self, history: History, alarm: Alarm) -> Alarm:
        logits = measured(history, "max_logit")
        if (logits[np.isfinite(logits)] > thresholds.CLIPS).any():
            remedy = f"{HOLD}  # from the last checkpoint before this step"
            return dataclasses.replace(alarm, cause=GROWTH, remedy=remedy)
        return alarm


def _look(origin: Origin) -> str:
    """The line that mends an origin, or finds the module."""
    if origin.stage == WEIGHTS:
        return FIND_NON_FINITE
    if origin.stage == OUTPUT and "sees no key" in origin.meaning:
        return SEE_A_KEY
    return TRACE_NAN


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saturation(Rule):
    """What a head's softmax passes back (`softmax_gradient`) fell to a `fall`-th of its first value, while its spread passed
    `threshold` (nats).

    Healthy models have heads that pass back as little, such as sinks and heads that attend to the key before, so neither
    of the two alone is a reason.

    >>> str(Saturation().severity)
    'notice'
    """

    fall: float = 10.0
    threshold: float = thresholds.CLIPS
    severity: Severity = Severity.NOTICE
    source: str = "derived: a softmax passes back Σ p (1 - p), which is near 0 where one key takes all; as a notice in "
    "experiments/notes/alarms.md"
    cause: str = "a head's softmax is saturated"

    def check(self, history: History) -> Alarm | None:
        # NaN, which is under nothing, in runs that were recorded without it.
        gradients = measured(history, "softmax_gradient")
        spreads = measured(history, "logit_spread")[-1]
        is_spread = spreads > self.threshold
        # Reading all records takes time, and few heads ever get there.
        if not is_spread.any():
            return None
        # Each head is compared with its own first number, since a layer may run late.
        starts = np.isfinite(gradients).argmax(0)
        early = np.take_along_axis(gradients, starts[None], 0)[0]
        has_fallen = (gradients[-1] * self.fall < early) & is_spread
        if not has_fallen.any():
            return None
        at = peak("softmax_gradient", np.where(has_fallen, spreads, np.nan))
        course = at.of(gradients)
        value, spread = float(course[-1]), float(spreads[at.layer, at.head])
        meaning = (
            f"the head is saturated: its softmax passes back {value:.2g} of what uniform attention would, and its largest "
            f"logit lies {spread:,.3g} over the mean"
        )
        course_in_words = trend(history, course)
        return self.alarm(history, meaning, value, at=at, trend=course_in_words)


# These rules check every watched run; their thresholds are in thresholds.py.
DEFAULT: tuple[Rule, ...] = (
    Ceiling(
        threshold=thresholds.CLIPS,
        severity=Severity.NOTICE,
        source=thresholds.SOURCES[thresholds.CLIPS],
    ),
    Ceiling(threshold=thresholds.HARMS, source=thresholds.SOURCES[thresholds.HARMS]),
    Ceiling(
        threshold=thresholds.DIVERGES,
        severity=Severity.CRITICAL,
        source=thresholds.SOURCES[thresholds.DIVERGES],
    ),
    Growth(),
    Outlook(),
    Approach(threshold=thresholds.HARMS, source=thresholds.SOURCES[thresholds.HARMS]),
    Approach(
        threshold=thresholds.DIVERGES,
        severity=Severity.CRITICAL,
        source=thresholds.SOURCES[thresholds.DIVERGES],
    ),
    EntropyCollapse(),
    NonFinite(),
)
