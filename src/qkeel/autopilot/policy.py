"""The interface of a policy, records in, decisions out; and what decisions say and have put in force."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Self, final

from qkeel.errors import InvalidTypeError, InvalidValueError, check_known
from qkeel.metrics import Row
from qkeel.monitor.alarms.forecast import Forecast
from qkeel.monitor.alarms.history import History


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """All that a policy may know at one step: the records up to it, the sites, and what it has decided before.

    history: the merged samples of training, in order. sites: in the order of the layers of the history. missed:
    attentions that were seen but not understood. decisions: earlier ones. refused: actions that sites refused so far.
    """

    history: History
    sites: tuple[SiteFacts, ...]
    missed: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    refused: tuple[Refused, ...] = ()

    @property
    def step(self) -> int:
        """The step of the last record."""
        return int(self.history.steps[-1])

    @property
    def in_force(self) -> Held:
        """The action and its heads, by remedy and site."""
        return in_force(self.decisions, self.refused)

    def refuses(self, action: Action, site: str | None) -> str:
        """The reason why a site refuses an action, "" where it does not."""
        return next((r.reason for r in self.refused if r.action == action and r.site in (site, None)), "")


class Policy(abc.ABC):
    """A pure function of records. Subclasses are frozen dataclasses; their fields are the policy's options.

    `decide` sees the records up to one step and returns what is to be done then. It keeps nothing from call to call and
    knows neither model nor optimizer, so the same records lead to the same decisions live, in a replay, and in every
    process of a run.
    """

    name: ClassVar[str]
    line: ClassVar[str]

    __slots__ = ()

    @abc.abstractmethod
    def decide(self, records: Records) -> tuple[Decision, ...]:
        """The decisions of the step of the last record."""


class Action(StrEnum):
    """The actions of an autopilot, in the order of the ladder: each costs more than the one before.

    WATCH: the run is measured more often. CLIP: qk_clip on heads. RATES: lalr, the rates of the q and k weights of
    heads. NORM: a q/k norm with fitted gains in the whole model. RATE: a lower learning rate is asked for, which
    nobody but the training script can give. NONE: no action is left.
    """

    WATCH = "watch_closer"
    CLIP = "qk_clip"
    RATES = "lalr"
    NORM = "calibrated_norm"
    RATE = "lower_rate"
    NONE = "nothing_left"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """A site as a policy sees it."""

    name: str  #: of the site
    n_heads: int  #: query heads
    unknown: str = ""  #: why the weights of its heads are not confirmed; "" if they are


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An action that a site refused (None: the whole model) when it was tried at `step`, and why."""

    step: int
    action: str  #: by name
    site: str | None  #: by name
    reason: str  #: in words


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An action at one site, or its release."""

    step: int  #: optimizer steps done when it was made
    action: Action  #: what is done, or released
    site: str | None = None  #: None: the whole model
    heads: tuple[int, ...] = ()  #: those it acts on, or that are released; empty for all
    remedy: str = ""  #: what is applied, as a spec string; "" where it is no remedy
    release: bool = False  #: whether it ends the action
    rule: str  #: what raised it
    forecast: Forecast | None = None  #: of the largest logit, where one could be made
    expected: str  #: the effect, in words
    reason: str  #: in words

    def __post_init__(self) -> None:
        check_known("action of an autopilot", self.action, list(Action))
        if not all(type(head) is int and head >= 0 for head in self.heads):
            raise InvalidTypeError(f"expected numbers of heads, got {self.heads!r}")

    def __str__(self) -> str:
        """One sentence: when, where, what and why."""
        heads = (
            "" if not self.heads else f", head{'s' if len(self.heads) > 1 else ''} {', '.join(map(str, self.heads))}"
        )
        place = "" if self.site is None else f", {self.site or 'the model itself'}{heads}"
        what = f"releases {self.action}" if self.release else self.remedy or self.action.replace("_", " ")
        ahead = "" if self.forecast is None else f"; max logit {self.forecast}"
        return f"autopilot at step {self.step:,}{place}: {what}: {self.reason}{ahead}. Expected: {self.expected}"

    def row(self) -> Row:
        """The decision as a line of events.jsonl."""
        return _row("decision", self)

    @classmethod
    def of(cls, row: Row) -> Self:
        """The decision that `row()` gave; other fields of the line are left out."""
        try:
            known = {field.name: row[field.name] for field in dataclasses.fields(cls)}
            ahead = None if row["forecast"] is None else Forecast(**row["forecast"])
            return cls(**known | {"action": Action(row["action"]), "heads": tuple(row["heads"]), "forecast": ahead})
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValueError(f"expected a decision as an autopilot records it, got {dict(row)!r}") from error


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect, seen at `step`, of the decision of step `of_step`: the largest logit of its heads then and now."""

    step: int
    of_step: int
    action: Action  #: of the decision
    site: str | None  #: of the decision; None: the whole model
    heads: tuple[int, ...]  #: of the decision; empty: all
    before: float  #: largest logit at `of_step`, in nats
    after: float  #: largest logit at `step`, in nats
    expected: str  #: the effect that the decision named, in words

    def __str__(self) -> str:
        """One sentence."""
        place = "" if self.site is None else f" at {self.site or 'the model itself'}"
        return (
            f"autopilot at step {self.step:,}: since {self.action}{place} at step {self.of_step:,} the max logit went "
            f"from {self.before:,.4g} to {self.after:,.4g}"
        )

    def row(self) -> Row:
        """The effect as a line of events.jsonl."""
        return _row("effect", self)


def _row(event: str, one: Decision | Effect) -> Row:
    """As JSON gives it back, so that events are equal after a resume."""
    plain = dataclasses.asdict(one) | {"action": str(one.action), "heads": list(one.heads)}
    return {"event": event, **plain, "text": str(one)}


Held = dict[tuple[str, str | None], tuple[Action, tuple[int, ...]]]


def in_force(decisions: Sequence[Decision], refused: Sequence[Refused] = ()) -> Held:
    """Returns what is in force after these decisions: by (remedy, site) the action and its heads, empty for all.

    A decision that was refused at its step changes nothing. A norm takes the place of what acts on steps.

    >>> in_force([Decision(step=1, action=Action.RATES, site="a", remedy="lalr", rule="", expected="", reason="")])
    {('lalr', 'a'): (<Action.RATES: 'lalr'>, ())}
    """
    gone = {(one.step, one.action, one.site) for one in refused}
    found: Held = {}
    for one in decisions:
        key = (one.remedy or str(one.action), one.site)
        old = found.get(key, (one.action, ()))[1]
        if not one.release:
            if (one.step, str(one.action), one.site) not in gone:
                if one.action is Action.NORM:
                    found = {k: held for k, held in found.items() if held[0] not in (Action.CLIP, Action.RATES)}
                found[key] = one.action, tuple(sorted({*old, *one.heads}))
        elif left := tuple(h for h in old if one.heads and h not in one.heads):
            found[key] = one.action, left
        else:
            found.pop(key, None)
    return found
