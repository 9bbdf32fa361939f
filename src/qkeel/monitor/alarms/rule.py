"""Alarms and rules: a rule is a condition on records, without state."""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from enum import StrEnum
from typing import final

import numpy as np

from qkeel.monitor.alarms.forecast import Forecast, forecast
from qkeel.monitor.alarms.history import History, Place

HOLD = 'qkeel.apply("lalr:tau=0.1+qk_clip:threshold=100", model, optimizer)'
GROWTH = "attention logits grow too large"  # what most alarms are about


class Severity(StrEnum):
    """The three grades of an alarm.

    NOTICE: worth knowing, healthy runs have it too. ALARM: act, or lose loss. CRITICAL: runs do not come back.
    """

    NOTICE = "notice"
    ALARM = "alarm"
    CRITICAL = "critical"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A reason to act: where, how much, how the value grows, and the line of code that helps.

    `rule` is the name of the rule, `severity` notice, alarm or critical, `step` the optimizer step. `value` is the
    number that the rule judged, in the unit of its field: nats for logits and entropies. `meaning` and `trend` say it
    in words, `remedy` is the line of code, and `source` where the threshold comes from. `layer` and `head` are None
    where the rule is about the whole model, or the whole layer. `cause` is what is going wrong, in words: alarms of one
    cause belong together, and have one remedy.
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

    @property
    def line(self) -> str:
        """What was seen, where and when, without what to do about it."""
        place = (
            ""
            if self.layer is None
            else f", {self.layer or 'the model itself'}" + ("" if self.head is None else f", head {self.head}")
        )
        trend = f"; {self.trend}" if self.trend else ""
        return f"{self.severity} at step {self.step:,}{place}: {self.meaning}{trend}"

    def __str__(self) -> str:
        """One line a person can act on."""
        return f"{self.line}. To act: {self.remedy}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule(abc.ABC):
    """A condition on the history of a run; `source` says where its numbers come from."""

    severity: Severity = Severity.ALARM  #: of its alarms
    source: str = ""  #: paper, page or derivation, in words
    remedy: str = HOLD  #: the line of code that an alarm advises
    cause: str = GROWTH  #: what goes wrong: alarms of one cause are one story

    @property
    def name(self) -> str:
        """The name of the rule, by default the words of its class's name; each name raises one alarm a run."""
        return re.sub("(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()

    @abc.abstractmethod
    def check(self, history: History) -> Alarm | None:
        """The alarm, if the last record is a reason for one."""

    def alarm(self, history: History, meaning: str, value: float, *, at: Place | None = None, trend: str = "") -> Alarm:
        """The alarm of the last record."""
        layer, head = (None, None) if at is None else history.where(at)
        return Alarm(
            rule=self.name,
            severity=self.severity,
            step=int(history.steps[-1]),
            value=value,
            meaning=meaning,
            trend=trend,
            remedy=self.remedy,
            source=self.source,
            layer=layer,
            head=head,
            cause=self.cause,
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extreme:
    """The largest entry of the last record: where, how much, its series [n], and [n] the largest of each record."""

    at: Place
    value: float
    series: np.ndarray
    envelope: np.ndarray


@functools.lru_cache(maxsize=4)  # a History never changes, and most rules ask the same
def largest(history: History, name: str) -> Extreme | None:
    """The head that is largest in the last record; NaN counts as not measured; None if nothing is."""
    series = history.series(name)
    if series is None or not len(series) or np.isnan(series[-1]).all():
        return None
    at = peak(name, series[-1])
    envelope = history.top(name)
    found = series[:, at.layer, at.head]
    return Extreme(at=at, value=float(found[-1]), series=found, envelope=found if envelope is None else envelope)


def peak(name: str, record: np.ndarray) -> Place:
    """The place where one record [layers heads] is largest; at least one entry must be a number."""
    layer, head = np.unravel_index(int(np.nanargmax(record)), record.shape)
    return Place(name, int(layer), int(head))


def ahead(history: History, values: np.ndarray, threshold: float) -> Forecast | None:
    """The forecast of when `values` [n], a series of this history, pass `threshold`; see forecast."""
    return forecast(history.steps, values, threshold, rates=history.rates, planned=history.planned)


def first(values: np.ndarray) -> int:
    """The first record at which `values` [n] were measured: names may come late."""
    return int(np.argmax(np.isfinite(values)))


def trend(history: History, values: np.ndarray, of: str = "it") -> str:
    """The growth of a value in words: of what, from where, and what a doubling of the training does to it, which is
    counted in learning rates summed over steps."""
    start = first(values)
    was = f"{of} was {values[start]:.3g} at step {int(history.steps[start]):,}"
    found = ahead(history, values, 10 * float(values[-1])) if values[-1] > 0 else None
    if found is None:
        return was
    return f"{was}, and each doubling of the training multiplies it by {2**found.exponent:.2g}"
