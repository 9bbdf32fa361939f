"""Policies of the autopilot: pure functions that map the records of a run to the next remedy.

Shapes: n records; [layers heads] for one record, [n layers heads] for series. Values of heads that a layer does not
have, or that were not measured, are NaN.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Self, final

import numpy as np
from jaxtyping import Bool, Float

from qkeel.errors import InvalidTypeError, InvalidValueError, check_known
from qkeel.metrics import Row
from qkeel.monitor import thresholds
from qkeel.monitor.history import Forecast, History, clock, forecast
from qkeel.monitor.rules import Alarm, Approach, Ceiling, EntropyCollapse, Growth, Outlook, Rule, Severity
from qkeel.options import Count, Positive, Term, build, lookup, parse, settle

# The interface of a policy, which receives records and returns decisions.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """All information that a policy receives at one step.

    history: the merged training samples, in order. sites: the sites, in the order of the history's layers. missed:
    attention calls that were observed but not understood. decisions: earlier decisions. refused: the actions that sites
    have refused so far.
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
    def active_actions(self) -> ActiveActions:
        """The active action and its heads for each pair of remedy and site."""
        return active_actions(self.decisions, self.refused)

    def refuses(self, action: Action, site: str | None) -> str:
        """Returns the reason why a site refuses an action, or "" if it does not."""
        return next((r.reason for r in self.refused if r.action == action and r.site in (site, None)), "")


class Policy(abc.ABC):
    """A pure function of records. Subclasses are frozen dataclasses; their fields are the policy's options.

    `decide` receives the records up to a step and returns the decisions for that step. It keeps no state between calls
    and has no access to the model or the optimizer, so that the same records lead to the same decisions in training, in
    a replay, and on every process of a run.
    """

    name: ClassVar[str]
    line: ClassVar[str]

    __slots__ = ()

    @abc.abstractmethod
    def decide(self, records: Records) -> tuple[Decision, ...]:
        """Returns the decisions for the step of the last record."""


class Action(StrEnum):
    """The actions of an autopilot, from cheapest to most expensive.

    WATCH: measure more often. CLIP: qk_clip on heads. RATES: lalr, lower rates for the q and k weights of heads. NORM:
    a q/k norm with fitted gains throughout the model. RATE: request a lower learning rate, which only the training
    script can set. NONE: no action is left.
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
    """The information about a site that a policy receives."""

    name: str  #: name of the site
    n_heads: int  #: number of query heads
    unknown: str = ""  #: why the weights of its heads are not verified; "" if they are


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An action that a site refused when it was tried at `step`, and why."""

    step: int
    action: str  #: name of the action
    site: str | None  #: name of the site; None for the whole model
    reason: str  #: error message of the refusal


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An action at one site, or the release of an action."""

    step: int  #: number of completed optimizer steps at the decision
    action: Action  #: the action to take or to release
    site: str | None = None  #: name of the site; None for the whole model
    heads: tuple[int, ...] = ()  #: the heads to act on or to release; empty for all heads
    remedy: str = ""  #: string that specifies the remedy; "" if the action is not a remedy
    release: bool = False  #: whether this decision ends the action
    rule: str  #: name of the rule that raised it
    forecast: Forecast | None = None  #: forecast of the largest logit, if available
    expected: str  #: the expected effect, in words
    reason: str  #: the reason, in words

    def __post_init__(self) -> None:
        check_known("action of an autopilot", self.action, list(Action))
        if not all(type(head) is int and head >= 0 for head in self.heads):
            raise InvalidTypeError(f"expected head numbers, got {self.heads!r}")

    def __str__(self) -> str:
        """One sentence that states when, where, what and why."""
        heads = (
            "" if not self.heads else f", head{'s' if len(self.heads) > 1 else ''} {', '.join(map(str, self.heads))}"
        )
        place = "" if self.site is None else f", {self.site or 'the model itself'}{heads}"
        what = f"releases {self.action}" if self.release else self.remedy or self.action.replace("_", " ")
        foreseen = "" if self.forecast is None else str(self.forecast)
        ahead = f"; max logit {foreseen}" if foreseen not in self.reason else ""  # an alarm may state the same forecast
        return f"autopilot at step {self.step:,}{place}: {what}: {self.reason}{ahead}. Expected: {self.expected}"

    def row(self) -> Row:
        """The decision as a line of events.jsonl."""
        return _row("decision", self)

    @classmethod
    def of(cls, row: Row) -> Self:
        """Reconstructs the decision from what `row()` returned; other fields of the row are ignored."""
        try:
            known = {field.name: row[field.name] for field in dataclasses.fields(cls)}
            ahead = None if row["forecast"] is None else Forecast(**row["forecast"])
            return cls(**known | {"action": Action(row["action"]), "heads": tuple(row["heads"]), "forecast": ahead})
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValueError(f"expected a decision as an autopilot records it, got {dict(row)!r}") from error


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionEffect:
    """The effect of an earlier decision: the largest logit of its heads at the decision and now."""

    step: int  #: step at which the effect was measured
    of_step: int  #: step of the decision
    action: Action  #: action of the decision
    site: str | None  #: site of the decision; None for the whole model
    heads: tuple[int, ...]  #: heads of the decision; empty for all heads
    before: float  #: largest logit at `of_step`, in nats
    after: float  #: largest logit at `step`, in nats
    expected: str  #: the effect that the decision predicted, in words

    def __str__(self) -> str:
        """One sentence with the logit before and after."""
        place = "" if self.site is None else f" at {self.site or 'the model itself'}"
        return (
            f"autopilot at step {self.step:,}: since {self.action}{place} at step {self.of_step:,}, the max logit "
            f"went from {self.before:,.4g} to {self.after:,.4g}"
        )

    def row(self) -> Row:
        """The effect as a line of events.jsonl."""
        return _row("effect", self)


def _row(event: str, one: Decision | DecisionEffect) -> Row:
    """The event as a JSON row. Fields are converted first so that events compare equal after a resume from JSON."""
    plain = dataclasses.asdict(one) | {"action": str(one.action), "heads": list(one.heads)}
    return {"event": event, **plain, "text": str(one)}


ActiveActions = dict[tuple[str, str | None], tuple[Action, tuple[int, ...]]]


def active_actions(decisions: Sequence[Decision], refused: Sequence[Refused] = ()) -> ActiveActions:
    """Returns the actions that are active after these decisions, by (remedy, site), with their heads (empty for all).

    A decision that was refused when its step came has no effect. A norm replaces all remedies for optimizer steps.

    >>> rates = Decision(step=1, action=Action.RATES, site="a", remedy="lalr", rule="", expected="", reason="")
    >>> active_actions([rates])
    {('lalr', 'a'): (<Action.RATES: 'lalr'>, ())}
    """
    gone = {(one.step, one.action, one.site) for one in refused}
    found: ActiveActions = {}
    for one in decisions:
        key = (one.remedy or str(one.action), one.site)
        old = found.get(key, (one.action, one.heads))[1]
        if not one.release:
            if (one.step, str(one.action), one.site) not in gone:
                if one.action is Action.NORM:
                    found = {k: held for k, held in found.items() if held[0] not in (Action.CLIP, Action.RATES)}
                found[key] = one.action, tuple(sorted({*old, *one.heads})) if old and one.heads else ()
        elif left := tuple(h for h in old if one.heads and h not in one.heads):
            found[key] = one.action, left
        else:
            found.pop(key, None)
    return found


# Forecasts per head: which logits are growing.

FLOOR, FACTOR = thresholds.OUTLOOK_FLOOR, thresholds.OUTLOOK_FACTOR


def at_the_end(history: History, since: int = 0, faster: float = 1.0) -> Float[np.ndarray, "layers heads"]:
    """Extrapolates the largest logit of each head to the end of the run, in proportion to the sum of learning rates.

    z_end = z + faster · (z - z_s) (c_end - c) / (c - c_s), where c is the sum of learning rates and s = `since` is the
    first record used. This is the rule "outlook", applied to each head. If no schedule is known, or if the run does not
    follow it, c_end is four times the current sum. The result is NaN for heads that were not measured.

    >>> values = np.array([0.0, 5.0, 10.0]).reshape(3, 1, 1)
    >>> at_the_end(History(steps=np.arange(3), values={}, heads={"max_logit": values})).tolist()
    [[40.0]]
    """
    series = np.asarray(history.series("max_logit"), dtype=np.float64)
    planned = history.planned
    if planned is not None and planned.followed(history.steps, history.rates):
        ticks, end = planned.ticks(history.steps), float(planned.clock[-1])
    else:
        ticks = clock(history.steps, history.rates)
        end = thresholds.HORIZON * float(ticks[-1])
    passed = float(ticks[-1] - ticks[since])
    if passed <= 0:
        return series[-1]
    return series[-1] + faster * (series[-1] - series[since]) * ((end - float(ticks[-1])) / passed)


def growing(history: History, threshold: float) -> Bool[np.ndarray, "layers heads"]:
    """Returns True for heads whose logit is over 8 nats, has doubled since the first record and will end above
    `threshold`."""
    series = np.asarray(history.series("max_logit"), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        risen = (series[-1] > FLOOR) & (series[-1] > FACTOR * series[0])
        return risen & ~(at_the_end(history) <= threshold)


def ahead(history: History) -> Forecast | None:
    """Forecasts when the largest logit crosses the next alarm threshold; None if it will not."""
    top = history.top("max_logit")
    if top is None or not len(top) or not np.isfinite(top[-1]):
        return None
    over = next((t for t in (thresholds.CLIPS, thresholds.HARMS, thresholds.DIVERGES) if top[-1] < t), None)
    if over is None:
        return None
    return forecast(history.steps, top, over, rates=history.rates, planned=history.planned)


# The default policy: the cheapest action that limits the logits of the heads that need it.

# The alarms that trigger an action; their quality is measured in experiments/notes/alarms.md. Notices do not count,
# because they
# also occur in healthy runs.
RULES: tuple[Rule, ...] = (
    Outlook(),
    Growth(),
    Approach(threshold=thresholds.HARMS),
    Ceiling(threshold=thresholds.HARMS, severity=Severity.ALARM),
    EntropyCollapse(),
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ladder(Policy):
    """Escalates per head and site: watch closer, qk_clip or lalr, a calibrated norm, and a request for a lower learning
    rate.

    *Watch closer* measures every `every` steps, during the first `calm` records, while an action is active, and while a
    head is rising: its logit is over 8 nats, has doubled, and is forecast to end above `limit`. *qk_clip* at
    `threshold` starts when a head is rising or an alarm of RULES fires. It is applied to the heads that are rising or
    over the threshold, and to the head that the alarm names. Its steps are matched, unless the site refuses lalr, as it
    does if steps cannot be scaled. *lalr* takes its place at sites that refuse qk_clip. *Norm*, which is for the whole
    model and requires `allow_new_parameters`, follows after 2 · `patience` records if a logit of a site exceeds three
    times the threshold in spite of the remedy, or its entropy is below 0.05 nats. The last action is the request for a
    lower rate, with `ask_for_rate`. Actions that a site refuses are skipped; a site with no action left is reported
    once.

    lalr is released if the site stayed below half of the threshold for the last `calm` records and would end below it
    even if it grew 1/tau times as fast; qk_clip with full steps is released per head by the same rule at the current
    rate of growth. Each release doubles `calm` for that action and site. qk_clip with matched steps is never released,
    because its steps would become long again; nor is the norm, because the model was trained with it.
    """

    threshold: Positive = 15.0
    limit: Positive = thresholds.CLIPS
    tau: Positive = 0.1
    every: Count = 2
    patience: Count = 3
    calm: Count = 20
    allow_new_parameters: bool = False
    ask_for_rate: bool = False

    name: ClassVar[str] = "ladder"
    line: ClassVar[str] = "the cheapest action that limits the logits of the heads that need it"

    def __post_init__(self) -> None:
        settle(self, "the policy ladder")

    def decide(self, records: Records) -> tuple[Decision, ...]:
        series = records.history.series("max_logit")
        if series is None or not len(series) or "max_logit" not in records.history.heads:
            return ()
        return _Step(self, records).decide()


class _Step:
    """Computes the decisions of one step; a new object per step, so no state carries over."""

    def __init__(self, ladder: Ladder, records: Records) -> None:
        self.ladder, self.records, self.history = ladder, records, records.history
        self.logits = np.asarray(self.history.series("max_logit"), dtype=np.float64)
        self.held = records.active_actions
        self.sites = {i: site for i, site in enumerate(records.sites) if not site.unknown}
        self.rising = growing(self.history, ladder.limit)
        self.rises = bool(self.sites) and bool(self.rising[list(self.sites)].any())
        self.normed = any(action is Action.NORM for action, _ in self.held.values())

    def decide(self) -> tuple[Decision, ...]:
        """Returns all actions for which there is a reason, or releases if there are no such actions."""
        alarm = next((found for rule in RULES if (found := rule.check(self.history)) is not None), None)
        found = [*self.watch(), *self.clips(alarm), *self.more()]
        norm = next((one for one in found if one.action is Action.NORM), None)
        # A norm is one change to the whole model, which replaces all other actions.
        return tuple(found or self.releases()) if norm is None else (norm,)

    def spec(self, action: Action, site: str | None) -> str:
        """Returns the remedy that an action applies at a site, or has applied; "" if the action is not a remedy."""
        active = next((spec for (spec, place), (own, _) in self.held.items() if (own, place) == (action, site)), "")
        if active:
            return active
        matched = "" if self.records.refuses(Action.RATES, site) else ",steps=matched"
        return {
            Action.WATCH: f"watch:every={self.ladder.every}",
            Action.CLIP: f"qk_clip:threshold={self.ladder.threshold:g}{matched}",
            Action.RATES: f"lalr:tau={self.ladder.tau:g}",
            Action.NORM: "qk_norm",
        }.get(action, "")

    def of(self, action: Action, i: int | None, rule: str, reason: str, heads: tuple[int, ...] = ()) -> Decision:
        """Builds a decision for this step."""
        expected = {
            Action.WATCH: "a record every few steps; nothing else changes",
            Action.CLIP: f"the max logit of these heads stays at or under about {self.ladder.threshold:g}",
            Action.RATES: f"steps of this layer's query and key weights are at most {self.ladder.tau:g} times as long",
            Action.NORM: "the max logit is at most what the gains allow; qk_clip and lalr are removed",
            Action.RATE: "the logits grow in proportion to the learning rate",
            Action.NONE: "no change; the run continues as it is",
        }[action]
        site = None if i is None else self.records.sites[i].name
        return Decision(
            step=self.records.step,
            action=action,
            site=site,
            heads=heads,
            remedy=self.spec(action, site),
            rule=rule,
            forecast=ahead(self.history),
            expected=expected,
            reason=reason,
        )

    def watch(self) -> list[Decision]:
        """Measures more often at the start, where logits change most, and while they grow; then returns to normal."""
        if self._held(Action.WATCH, None) is None:
            if not self.sites or not (self.rises or len(self.history) == 1):
                return []
            why = self._outlook() if self.rises else "the run begins"
            return [self.of(Action.WATCH, None, "outlook of each head", why)]
        if self.rises or len(self.held) > 1 or self._since(Action.WATCH, None) < self.ladder.calm:
            return []
        return [
            self.off(self.spec(Action.WATCH, None), None, Action.WATCH, (), "nothing grows and no action is active")
        ]

    def _outlook(self) -> str:
        heads = int(self.rising[list(self.sites)].sum())
        which = "the logit of 1 head has" if heads == 1 else f"the logits of {heads} heads have"
        return f"{which} doubled and may end over {self.ladder.limit:g}"

    def clips(self, alarm: Alarm | None) -> list[Decision]:
        """Clips the heads that rise or that an alarm concerns and, at clipped sites, all heads over the threshold."""
        if self.normed:
            return []
        begins = self.rises or alarm is not None
        with np.errstate(invalid="ignore"):
            wanted = (self.logits[-1] > self.ladder.threshold) | (self.rising if begins else False)
        found = []
        for i, site in self.sites.items():
            clipped, rated = self._held(Action.CLIP, i), self._held(Action.RATES, i) is not None
            heads = set(np.flatnonzero(wanted[i][: site.n_heads]).tolist())
            if alarm is not None and alarm.layer == site.name:
                heads |= set(range(site.n_heads)) if alarm.head is None else {alarm.head}
            heads -= set(clipped or ())
            if not heads or rated or not (begins or clipped is not None):
                continue
            own = f"max logit {float(np.fmax.reduce(self.logits[-1, i])):,.4g}"
            if alarm is not None:
                elsewhere = f"{own} here, and at {alarm.layer or 'the model'}: {alarm.meaning}"
                rule, why = alarm.rule, alarm.meaning if alarm.layer == site.name else elsewhere
            elif self.rises:
                rule, why = "outlook of each head", f"{own}; {self._outlook()}"
            else:
                rule, why = "over the threshold", f"{own} at a site that is already clipped"
            found += self.above(None, i, rule, why, tuple(sorted(heads)))
        return found

    def more(self) -> list[Decision]:
        """Escalates at each site where the active action is not enough."""
        found = []
        for i in [] if self.normed else self.sites:
            last = next((a for a in (Action.RATES, Action.CLIP) if self._held(a, i) is not None), None)
            if last is not None and (why := self._not_enough(last, i)):
                found += self.above(last, i, "not enough", why)
        return found

    def above(self, last: Action | None, i: int, rule: str, reason: str, heads: tuple[int, ...] = ()) -> list[Decision]:
        """Returns the next action above `last` that is allowed and that the site accepts. lalr only takes the place of
        a clip: the rates that it sets rise as the clip shrinks the weights, which undoes matched steps."""
        allowed = [Action.CLIP, Action.RATES] if last is None else []
        allowed += [Action.NORM] if self.ladder.allow_new_parameters else []
        allowed += [Action.RATE] if self.ladder.ask_for_rate else []
        site = self.records.sites[i].name
        for action in allowed:
            if not self.records.refuses(action, site):
                whole = action in (Action.NORM, Action.RATE)
                asked = action is Action.RATE and any(d.action is Action.RATE for d in self.records.decisions)
                place, own = (None, ()) if whole else (i, heads if action is Action.CLIP else ())
                return [] if asked else [self.of(action, place, rule, reason, own)]
        if any(d.action is Action.NONE and d.site == site for d in self.records.decisions):
            return []
        refusals = [f"{a}: {why}" for a in allowed if (why := self.records.refuses(a, site))]
        return [self.of(Action.NONE, i, rule, "; ".join([f"{reason}, and no other action is allowed", *refusals]))]

    def _not_enough(self, last: Action, i: int) -> str:
        if self._since(last, i) < 2 * self.ladder.patience:
            return ""
        top = float(np.fmax.reduce(self.logits[-1, i]))
        if top > 3 * self.ladder.threshold:
            return f"its max logit is {top:.4g} under {last}"
        return self._low_entropy(i)

    def _low_entropy(self, i: int) -> str:
        series = self.history.series("entropy")
        own = np.zeros(0) if series is None else np.asarray(series[-1, i], dtype=np.float64)
        own = own[np.isfinite(own)]
        low = bool(len(own)) and float(own.mean()) < thresholds.ENTROPY
        return f"its mean attention entropy is {float(own.mean()):.3g} nats" if low else ""

    def releases(self) -> list[Decision]:
        """Releases actions that are no longer needed."""
        found = []
        for (spec, site), (action, heads) in self.held.items():
            i = next((i for i, own in self.sites.items() if own.name == site), None)
            if i is None or "steps=matched" in spec:
                continue
            calm = self._calm(i, action)
            own = [h for h in heads or range(self.records.sites[i].n_heads) if calm[h]]
            if own and (action is Action.CLIP or len(own) == self.records.sites[i].n_heads):
                why = f"under half the threshold for {self._patience(action, i)} records, and forecast to stay there"
                found.append(self.off(spec, site, action, tuple(own) if heads else (), why))
        return found

    def off(self, spec: str, site: str | None, action: Action, heads: tuple[int, ...], why: str) -> Decision:
        """Builds the release of an active action."""
        return Decision(
            step=self.records.step,
            action=action,
            site=site,
            heads=heads,
            remedy=spec,
            release=True,
            rule="no longer needed",
            expected=f"the max logit stays under {self.ladder.threshold:g}",
            reason=why,
        )

    def _calm(self, i: int, action: Action) -> np.ndarray:
        """Returns for each head [heads] whether it is far below the threshold and would stay there without the
        action."""
        n = self._patience(action, i)
        if self._since(action, i) < n:
            return np.zeros(self.logits.shape[-1], dtype=bool)
        # Without lalr the logits would grow 1/tau times as fast as observed.
        faster = 1 / self.ladder.tau if action is Action.RATES else 1.0
        with np.errstate(invalid="ignore"):
            low = ~(self.logits[-n:, i] >= 0.5 * self.ladder.threshold).any(0)
            end = at_the_end(self.history, len(self.logits) - n, faster)[i]
            return low & ~(end >= self.ladder.threshold)

    def _patience(self, action: Action, i: int) -> int:
        """Returns the number of calm records before a release; it doubles after each release."""
        site = self.records.sites[i].name
        before = {d.step for d in self.records.decisions if d.release and (d.action, d.site) == (action, site)}
        return self.ladder.calm * 2 ** min(len(before), 16)  # the limit keeps the integer small

    def _since(self, action: Action, i: int | None) -> int:
        """Returns the number of records since the last decision for this action at this site (None for the model)."""
        site = None if i is None else self.records.sites[i].name
        steps = [d.step for d in self.records.decisions if not d.release and (d.action, d.site) == (action, site)]
        return int((self.history.steps > max(steps, default=-1)).sum())

    def _held(self, action: Action, i: int | None) -> tuple[int, ...] | None:
        """Returns the heads on which an action is active at a site (None for the model), () for all heads, or None if
        it is not active."""
        site = None if i is None else self.records.sites[i].name
        return next((heads for (_, s), (a, heads) in self.held.items() if (a, s) == (action, site)), None)


POLICIES: dict[str, type[Policy]] = {"ladder": Ladder}


def policy(spec: str | Policy, *, parameters: bool = True) -> Policy:
    """Returns the policy that a string specifies, or the given policy itself.

    Args:
        spec: a string such as "ladder:threshold=50", or a Policy.
        parameters: if False, policies that may add parameters are rejected.

    Raises:
        UnknownNameError: the policy or an option does not exist.
        InvalidTypeError: `spec` is neither a string nor a Policy.
        InvalidValueError: the ladder may add parameters although `parameters` is False.

    >>> policy("ladder:threshold=50").threshold
    50.0
    """
    found = spec
    if isinstance(spec, str):
        terms = parse(spec)
        if len(terms) != 1:
            raise InvalidValueError(f"expected one policy, got {len(terms)} in {spec!r}")
        name = terms[0].name
        found = build(f"policy {name!r}", lookup("policy", POLICIES, name), terms[0].options)
    if not isinstance(found, Policy):
        raise InvalidTypeError(f"expected the name of a policy or a Policy, got {type(spec).__name__}")
    if not parameters and isinstance(found, Ladder) and found.allow_new_parameters:
        raise InvalidValueError(
            "expected a policy without allow_new_parameters, because the checkpoints of this trainer cannot store "
            "parameters that are added during training; use it in your own training loop, with "
            "qkeel.autopilot(model, optimizer, batch=batch)"
        )
    return found


def spelled(term: Term) -> str:
    """Returns the canonical spelling of a policy with its options, after checking that it adds no parameters.

    >>> spelled(parse("ladder:tau=0.10")[0])
    'ladder:tau=0.1'
    """
    policy(str(term), parameters=False)
    return str(term)
