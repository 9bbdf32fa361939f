"""AUTOPILOT: watches a training run, decides at each record which heads need a remedy, and applies it.

In the order of the file: what a decision is; the policy "ladder", a pure function from the records of a run to the
decisions of one step; the remedies that it switches on and off; and the handle that calls the one and the other.

Shapes: n records; [layers heads] for one record, [n layers heads] for series. Values of heads that a layer does not
have, or that were not measured, are NaN.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Self, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import (
    AlarmWarning,
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    RefusedError,
    caution,
)
from qkeel.handle import Handle, State, compose, under
from qkeel.heads.site import AttentionSite
from qkeel.metrics import Row
from qkeel.monitor import Cadence, PlannedRates, Sink, thresholds
from qkeel.monitor.history import Forecast, History, clock, forecast
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.record import Sample
from qkeel.monitor.recording import Recording
from qkeel.monitor.rules import (
    Alarm,
    Approach,
    Ceiling,
    EntropyCollapse,
    Growth,
    Outlook,
    Rule,
    Severity,
)
from qkeel.monitor.token_classes import MaskSource
from qkeel.monitor.watch import watch
from qkeel.options import Count, Positive, build, lookup, parse, settle
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import FaultGuard
from qkeel.patching.optimizers import StepHooks, listed, stepping, when_hooks_are_done
from qkeel.remedies import apply
from qkeel.remedies import parse as parse_remedies
from qkeel.remedies.optimizer_trials import innermost
from qkeel.remedies.retrofit import Retrofit, RetrofitConfig, retrofit
from qkeel.sites.find import find_sites

__all__ = [
    "Action",
    "Autopilot",
    "Decision",
    "Ladder",
    "Records",
    "Refused",
    "SiteFacts",
    "attach",
    "named_policy",
]

# What a decision is.


class Action(StrEnum):
    """The actions of an autopilot, from cheapest to most expensive.

    WATCH: measure more often. CLIP: qk_clip on heads. RATES: lalr, lower rates for the q and k weights of heads. NORM:
    a q/k norm with fitted gains throughout the model. NONE: no action is left.
    """

    WATCH = "watch_closer"
    CLIP = "qk_clip"
    RATES = "lalr"
    NORM = "calibrated_norm"
    NONE = "nothing_left"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """What a policy knows of a site."""

    name: str  #: name of the site
    n_heads: int  #: number of query heads
    unknown: str = ""  #: why the weights of its heads are not verified; "" if they are


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An action that a site refused when it was tried at `step`, and why."""

    step: int  #: step of the decision; -1 if the site was asked before any decision
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
    heads: tuple[
        int, ...
    ] = ()  #: the heads to act on or to release; empty for all heads
    remedy: str = (
        ""  #: string that specifies the remedy; "" if the action is not a remedy
    )
    release: bool = False  #: whether this decision ends the action
    rule: str  #: name of the rule that raised it
    forecast: Forecast | None = None  #: forecast of the largest logit, if available
    reason: str  #: the reason, in words

    def __str__(self) -> str:
        """One sentence that states when, where, what and why."""
        where = "" if self.site is None else f", {self.site or 'the model itself'}"
        if self.heads:
            where += f", head{'s' if len(self.heads) > 1 else ''} {', '.join(map(str, self.heads))}"
        action = (
            f"releases {self.action}"
            if self.release
            else self.remedy or self.action.replace("_", " ")
        )
        # An alarm's reason may state the same forecast.
        crossing = (
            ""
            if self.forecast is None or str(self.forecast) in self.reason
            else f"; max logit {self.forecast}"
        )
        return (
            f"autopilot at step {self.step:,}{where}: {action}: {self.reason}{crossing}"
        )

    def row(self) -> Row:
        """The decision as a line of events.jsonl."""
        fields = dataclasses.asdict(self) | {
            "action": str(self.action),
            "heads": list(self.heads),
        }
        return {"event": "decision", **fields, "text": str(self)}

    @classmethod
    def of(cls, row: Row) -> Self:
        """The decision of which `row` is the line.

        Raises:
            InvalidValueError: the row is none that `row()` returned.
        """
        try:
            fields = {field.name: row[field.name] for field in dataclasses.fields(cls)}
            crossing = None if row["forecast"] is None else Forecast(**row["forecast"])
            return cls(
                **fields
                | {
                    "action": Action(row["action"]),
                    "heads": tuple(row["heads"]),
                    "forecast": crossing,
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValueError(
                f"expected a decision as an autopilot records it, got {dict(row)!r}"
            ) from error


# The active actions by (action, site): the remedy and its heads (empty for all heads).
Active = dict[tuple[Action, str | None], tuple[str, tuple[int, ...]]]


def active_actions(
    decisions: Sequence[Decision], refused: Sequence[Refused] = ()
) -> Active:
    """Returns the actions that are active after these decisions, with their remedies and heads.

    A decision that was refused when its step came has no effect. A norm replaces all remedies for optimizer steps.

    >>> rates = Decision(step=1, action=Action.RATES, site="a", remedy="lalr", rule="", reason="")
    >>> active_actions([rates])
    {(<Action.RATES: 'lalr'>, 'a'): ('lalr', ())}
    """
    not_taken = {(refusal.step, refusal.action, refusal.site) for refusal in refused}
    active: Active = {}
    for decision in decisions:
        key = (decision.action, decision.site)
        _, heads = active.get(key, ("", decision.heads))
        if decision.release:
            left = tuple(
                head for head in heads if decision.heads and head not in decision.heads
            )
            active.pop(key, None)
            if left:
                active[key] = decision.remedy, left
        elif (decision.step, str(decision.action), decision.site) not in not_taken:
            if decision.action is Action.NORM:
                active = {
                    k: v
                    for k, v in active.items()
                    if k[0] not in (Action.CLIP, Action.RATES)
                }
            together = (
                tuple(sorted({*heads, *decision.heads}))
                if heads and decision.heads
                else ()
            )
            active[key] = decision.remedy, together
    return active


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """All that a policy is told at one step."""

    history: History  #: the merged training samples, in order
    sites: tuple[SiteFacts, ...]  #: the sites, in the order of the history's layers
    decisions: tuple[Decision, ...] = ()  #: earlier decisions
    refused: tuple[Refused, ...] = ()  #: the actions that sites have refused so far

    @property
    def step(self) -> int:
        """The step of the last record."""
        return int(self.history.steps[-1])

    def refuses(self, action: Action, site: str | None) -> str:
        """Returns the reason why a site refuses an action, or "" if it does not."""
        for refusal in self.refused:
            if refusal.action == action and refusal.site in (site, None):
                return refusal.reason
        return ""


# The policy: the cheapest action that limits the logits of the heads that need it.

# The alarms that trigger an action; their quality is measured in experiments/notes/alarms.md. Notices do not count,
# because they also occur in healthy runs.
RULES: tuple[Rule, ...] = (
    Outlook(),
    Growth(),
    Approach(threshold=thresholds.HARMS),
    Ceiling(threshold=thresholds.HARMS, severity=Severity.ALARM),
    EntropyCollapse(),
)


def at_the_end(
    history: History, since: int = 0, faster: float = 1.0
) -> Float[np.ndarray, "layers heads"]:
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
    return series[-1] + faster * (series[-1] - series[since]) * (
        (end - float(ticks[-1])) / passed
    )


def growing(history: History, limit: float) -> Bool[np.ndarray, "layers heads"]:
    """Returns True for heads whose logit is over 8 nats, has doubled since the first record and will end above
    `limit`."""
    series = np.asarray(history.series("max_logit"), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        risen = (series[-1] > thresholds.OUTLOOK_FLOOR) & (
            series[-1] > thresholds.OUTLOOK_FACTOR * series[0]
        )
        return risen & ~(at_the_end(history) <= limit)


def _crossing(history: History) -> Forecast | None:
    """Forecasts when the largest logit crosses the next alarm threshold; None if it will not."""
    top = history.top("max_logit")
    if top is not None and len(top) and np.isfinite(top[-1]):
        for threshold in (thresholds.CLIPS, thresholds.HARMS, thresholds.DIVERGES):
            if top[-1] < threshold:
                return forecast(
                    history.steps,
                    top,
                    threshold,
                    rates=history.rates,
                    planned=history.planned,
                )
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Escalates per head and site: watch closer, qk_clip or lalr, and a calibrated norm.

    *Watch closer* measures every `every` steps, during the first `calm` records, while an action is active, and while a
    head is rising: its logit is over 8 nats, has doubled, and is forecast to end above `limit`. *qk_clip* at
    `threshold` starts when a head is rising or an alarm of RULES fires. It is applied to the heads that are rising or
    over the threshold, and to the head that the alarm names. Its steps are matched, unless the site refuses lalr, as it
    does if steps cannot be scaled. *lalr* takes its place at sites that refuse qk_clip. *Norm*, which is for the whole
    model and requires `allow_new_parameters`, follows after 2 · `patience` records if a logit of a site exceeds three
    times the threshold in spite of the remedy, or its entropy is below 0.05 nats. Actions that a site refuses are
    skipped; a site with no action left is reported once.

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

    def __post_init__(self) -> None:
        settle(self, "the policy ladder")

    def decide(self, records: Records) -> tuple[Decision, ...]:
        """Returns the decisions for the step of the last record.

        It depends on the records alone, so that every process of a run, and a run that was resumed, decide alike.
        """
        series = records.history.series("max_logit")
        if (
            series is None
            or not len(series)
            or "max_logit" not in records.history.heads
        ):
            return ()
        return _Step(self, records).decide()


class _Step:
    """The decisions of one step; a new object per step, so no state carries over."""

    def __init__(self, ladder: Ladder, records: Records) -> None:
        self.ladder, self.records, self.history = ladder, records, records.history
        self.logits = np.asarray(self.history.series("max_logit"), dtype=np.float64)
        self.active = active_actions(records.decisions, records.refused)
        self.sites = {
            i: site for i, site in enumerate(records.sites) if not site.unknown
        }
        self.rising = growing(self.history, ladder.limit)
        self.heads_rising = int(self.rising[list(self.sites)].sum())

    def decide(self) -> tuple[Decision, ...]:
        """Returns all actions for which there is a reason, or releases if there are no such actions."""
        alarm = None
        for rule in RULES:
            alarm = alarm or rule.check(self.history)
        decisions = self.watch()
        if not any(action is Action.NORM for action, _ in self.active):
            decisions += [*self.clips(alarm), *self.escalations()]
        for decision in decisions:
            if (
                decision.action is Action.NORM
            ):  # one change to the whole model, which replaces all other actions
                return (decision,)
        return tuple(decisions or self.releases())

    def remedy(self, action: Action, site: str | None) -> str:
        """Returns the remedy that an action applies at a site, or has applied; "" if the action is not a remedy."""
        if (action, site) in self.active:
            return self.active[action, site][0]
        matched = "" if self.records.refuses(Action.RATES, site) else ",steps=matched"
        return {
            Action.WATCH: f"watch:every={self.ladder.every}",
            Action.CLIP: f"qk_clip:threshold={self.ladder.threshold:g}{matched}",
            Action.RATES: f"lalr:tau={self.ladder.tau:g}",
            Action.NORM: "qk_norm",
        }.get(action, "")

    def take(
        self,
        action: Action,
        site: str | None,
        rule: str,
        reason: str,
        heads: tuple[int, ...] = (),
    ) -> Decision:
        """Builds a decision for this step."""
        return Decision(
            step=self.records.step,
            action=action,
            site=site,
            heads=heads,
            remedy=self.remedy(action, site),
            rule=rule,
            forecast=_crossing(self.history),
            reason=reason,
        )

    def release(
        self, action: Action, site: str | None, reason: str, heads: tuple[int, ...] = ()
    ) -> Decision:
        """Builds the release of an active action."""
        return Decision(
            step=self.records.step,
            action=action,
            site=site,
            heads=heads,
            remedy=self.remedy(action, site),
            release=True,
            rule="no longer needed",
            reason=reason,
        )

    def watch(self) -> list[Decision]:
        """Measures more often at the start, where logits change most, and while they grow; then returns to normal."""
        if (Action.WATCH, None) not in self.active:
            if not self.sites or not (self.heads_rising or len(self.history) == 1):
                return []
            reason = self._outlook() if self.heads_rising else "the run begins"
            return [self.take(Action.WATCH, None, "outlook of each head", reason)]
        if (
            self.heads_rising
            or len(self.active) > 1
            or self._records_since(Action.WATCH, None) < self.ladder.calm
        ):
            return []
        return [
            self.release(Action.WATCH, None, "nothing grows and no action is active")
        ]

    def _outlook(self) -> str:
        n = self.heads_rising
        heads = "the logit of 1 head has" if n == 1 else f"the logits of {n} heads have"
        return f"{heads} doubled and may end over {self.ladder.limit:g}"

    def clips(self, alarm: Alarm | None) -> list[Decision]:
        """Clips the heads that rise or that an alarm concerns and, at clipped sites, all heads over the threshold."""
        is_begun = self.heads_rising > 0 or alarm is not None
        with np.errstate(invalid="ignore"):
            high = (self.logits[-1] > self.ladder.threshold) | (
                self.rising if is_begun else False
            )
        decisions = []
        for i, site in self.sites.items():
            is_clipped = (Action.CLIP, site.name) in self.active
            if (Action.RATES, site.name) in self.active or not (is_begun or is_clipped):
                continue
            heads = set(np.flatnonzero(high[i][: site.n_heads]).tolist())
            if alarm is not None and alarm.layer == site.name:
                heads |= (
                    set(range(site.n_heads)) if alarm.head is None else {alarm.head}
                )
            if is_clipped:
                heads -= set(self.active[Action.CLIP, site.name][1])
            if not heads:
                continue
            largest = f"max logit {float(np.fmax.reduce(self.logits[-1, i])):,.4g}"
            if alarm is not None:
                rule, reason = alarm.rule, alarm.meaning
                if alarm.layer != site.name:
                    reason = (
                        f"{largest} here, and at {alarm.layer or 'the model'}: {reason}"
                    )
            elif self.heads_rising:
                rule, reason = "outlook of each head", f"{largest}; {self._outlook()}"
            else:
                rule, reason = (
                    "over the threshold",
                    f"{largest} at a site that is already clipped",
                )
            actions = (Action.CLIP, Action.RATES)
            decisions += self.next_action(
                actions, site.name, rule, reason, tuple(sorted(heads))
            )
        return decisions

    def escalations(self) -> list[Decision]:
        """Escalates at each site where the active action is not enough."""
        decisions = []
        for i, site in self.sites.items():
            action = (
                Action.RATES
                if (Action.RATES, site.name) in self.active
                else Action.CLIP
            )
            since = self._records_since(action, site.name)
            if (
                action,
                site.name,
            ) not in self.active or since < 2 * self.ladder.patience:
                continue
            largest, entropy = float(np.fmax.reduce(self.logits[-1, i])), np.nan
            series = self.history.series("entropy")
            if series is not None:
                entropies = np.asarray(series[-1, i], dtype=np.float64)
                entropies = entropies[np.isfinite(entropies)]
                entropy = float(entropies.mean()) if len(entropies) else np.nan
            if largest > 3 * self.ladder.threshold:
                decisions += self.next_action(
                    (),
                    site.name,
                    "not enough",
                    f"its max logit is {largest:.4g} under {action}",
                )
            elif entropy < thresholds.ENTROPY:
                reason = f"its mean attention entropy is {entropy:.3g} nats"
                decisions += self.next_action((), site.name, "not enough", reason)
        return decisions

    def next_action(
        self,
        actions: tuple[Action, ...],
        site: str,
        rule: str,
        reason: str,
        heads: tuple[int, ...] = (),
    ) -> list[Decision]:
        """Returns the first that the site accepts of these actions and of those for the whole model that are allowed.

        lalr only takes the place of a clip: the rates that it sets rise as the clip shrinks the weights, which undoes
        matched steps.
        """
        actions += (Action.NORM,) * self.ladder.allow_new_parameters
        for action in actions:
            if self.records.refuses(action, site):
                continue
            if action in (Action.CLIP, Action.RATES):
                return [
                    self.take(
                        action,
                        site,
                        rule,
                        reason,
                        heads if action is Action.CLIP else (),
                    )
                ]
            return [self.take(action, None, rule, reason)]
        if (Action.NONE, site) in self.active:  # it was said
            return []
        refusals = [
            f"{a}: {why}" for a in actions if (why := self.records.refuses(a, site))
        ]
        reason = "; ".join([f"{reason}, and no other action is allowed", *refusals])
        return [self.take(Action.NONE, site, rule, reason)]

    def releases(self) -> list[Decision]:
        """Releases the remedies whose heads are far below the threshold and would stay there without them."""
        decisions = []
        for i, site in self.sites.items():
            for action in (Action.CLIP, Action.RATES):
                remedy, heads = self.active.get((action, site.name), ("", ()))
                earlier = {
                    d.step
                    for d in self.records.decisions
                    if d.release and (d.action, d.site) == (action, site.name)
                }
                # The records to wait double with each release; the limit keeps the integer small.
                n = self.ladder.calm * 2 ** min(len(earlier), 16)
                if (
                    not remedy
                    or "steps=matched" in remedy
                    or self._records_since(action, site.name) < n
                ):
                    continue
                # Without lalr the logits would grow 1/tau times as fast as observed.
                faster = 1 / self.ladder.tau if action is Action.RATES else 1.0
                with np.errstate(invalid="ignore"):
                    low = ~(self.logits[-n:, i] >= 0.5 * self.ladder.threshold).any(0)
                    low &= ~(
                        at_the_end(self.history, len(self.logits) - n, faster)[i]
                        >= self.ladder.threshold
                    )
                calm = tuple(head for head in heads or range(site.n_heads) if low[head])
                if calm and (action is Action.CLIP or len(calm) == site.n_heads):
                    reason = f"under half the threshold for {n} records, and forecast to stay there"
                    decisions.append(
                        self.release(action, site.name, reason, calm if heads else ())
                    )
        return decisions

    def _records_since(self, action: Action, site: str | None) -> int:
        """Returns the number of records since the last decision for this action at this site (None for the model)."""
        steps = [
            d.step
            for d in self.records.decisions
            if not d.release and (d.action, d.site) == (action, site)
        ]
        return int((self.history.steps > max(steps, default=-1)).sum())


def named_policy(spec: str | Ladder, *, parameters: bool = True) -> Ladder:
    """Returns the policy that a string specifies, or the given policy itself.

    Args:
        spec: "ladder", with options if needed ("ladder:threshold=50"), or a Ladder.
        parameters: if False, a policy that may add parameters is refused.

    Raises:
        UnknownNameError: the policy or an option does not exist.
        InvalidTypeError: `spec` is neither a string nor a Ladder.
        InvalidValueError: the policy may add parameters although `parameters` is False.

    >>> named_policy("ladder:threshold=50").threshold
    50.0
    """
    if isinstance(spec, str):
        terms = parse(spec)
        if len(terms) != 1:
            raise InvalidValueError(
                f"expected one policy, got {len(terms)} in {spec!r}"
            )
        ladder = build(
            "policy 'ladder'",
            lookup("policy", {"ladder": Ladder}, terms[0].name),
            terms[0].options,
        )
    else:
        ladder = spec
    if not isinstance(ladder, Ladder):
        raise InvalidTypeError(
            f"expected the name of a policy or a Ladder, got {type(spec).__name__}"
        )
    if ladder.allow_new_parameters and not parameters:
        raise InvalidValueError(
            "expected a policy without allow_new_parameters, because the checkpoints of this trainer cannot store "
            "parameters that are added during training; use it in your own training loop, with "
            "qkeel.autopilot(model, optimizer, batch=batch)"
        )
    return ladder


# The remedies of a run. No other code in this file changes the model.

RemedyKey = tuple[
    str, int
]  # a remedy with its options, and the index of the optimizer that it acts on
SiteHeads = dict[str, tuple[int, ...]]  # heads by site, where () stands for all heads
Refusals = list[tuple[Action, str | None, str]]


@final
class ActiveRemedies:
    """The remedies that are applied, with one handle per remedy and optimizer.

    To change the heads of a remedy, its handle is removed and the remedy is applied again with the old state. If a site
    refuses, the previous remedies are restored, so that no remedy remains partially applied.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], batch: object
    ) -> None:
        self.model, self.optimizers, self.batch = model, optimizers, batch
        self.handles: dict[RemedyKey, tuple[Handle, SiteHeads]] = {}
        self.norm: tuple[str, Retrofit] | None = None
        self.sites: list[AttentionSite] = []
        self._optimizer_of: dict[str, int] = {}

    def know(self, sites: Sequence[AttentionSite]) -> None:
        """Sets the sites. After a resume without remedies, the sites are found later, in the first measured pass."""
        self.sites = list(sites)
        parameters = dict(self.model.named_parameters())
        for site in self.sites:
            weights = {
                id(parameters.get(part.parameter)) for part in (*site.query, *site.key)
            }
            self._optimizer_of[site.name] = (
                0  # if the site only knows copies of its weights
            )
            for number, optimizer in enumerate(self.optimizers):
                if any(
                    id(p) in weights
                    for group in optimizer.param_groups
                    for p in group["params"]
                ):
                    self._optimizer_of[site.name] = number
                    break

    def try_all(self) -> Refusals:
        """Returns what sites refuse, which is determined by applying each remedy and removing it again; the model stays
        bit-identical."""
        refusals: Refusals = []
        for site in self.sites:
            for action in (Action.CLIP, Action.RATES) if site.verified else ():
                if reason := self._refusal(
                    (str(action), self._optimizer_of[site.name]), {site.name: ()}
                ):
                    refusals.append((action, site.name, reason))
        if self.batch is None:
            refusals.append(
                (
                    Action.NORM,
                    None,
                    "its gains are fitted on a batch: pass batch=batch to the autopilot",
                )
            )
        return refusals

    def set(self, active: Active) -> Refusals:
        """Applies exactly the remedies that should be active; returns what was refused."""
        remedies: dict[RemedyKey, SiteHeads] = {}
        for (action, site), (spec, heads) in active.items():
            if (
                action is Action.NORM
                and self.norm is None
                and (reason := self.insert_norm(spec))
            ):
                return [(action, None, reason)]
            if action in (Action.CLIP, Action.RATES) and site is not None:
                remedies.setdefault((spec, self._optimizer_of[site]), {})[site] = heads
        for key in self.handles.keys() - remedies.keys():
            self.handles.pop(key)[0].remove()
        refusals: Refusals = []
        for key, heads_of in remedies.items():
            if key not in self.handles or self.handles[key][1] != heads_of:
                action = Action(parse(key[0])[0].name)
                refusals += [
                    (action, site, reason)
                    for site, reason in self._exchange(key, heads_of)
                ]
        return refusals

    def _exchange(self, key: RemedyKey, heads_of: SiteHeads) -> list[tuple[str, str]]:
        """Changes the heads of a remedy; returns the sites that refuse and the reasons."""
        handle, before = self.handles.pop(key, (None, {}))
        state = {} if handle is None else handle.state()
        if handle is not None:
            handle.remove()
        try:
            self.put_on(key, heads_of, state)
            return []
        except QkeelError:  # at least one site refuses: try the sites one by one
            accepted = {
                site: heads for site, heads in before.items() if site in heads_of
            }
        refusals = []
        for site, heads in heads_of.items():
            if reason := self._refusal(key, {**accepted, site: heads}):
                refusals.append((site, reason))
            else:
                accepted[site] = heads
        if accepted:
            self.put_on(key, accepted, state)
        return refusals

    def put_on(self, key: RemedyKey, heads_of: SiteHeads, state: State) -> None:
        """Applies a remedy to these heads, and restores its `state` as far as that knows them.

        Raises:
            QkeelError: a site refuses; in that case, nothing is changed.
        """
        handle = self._applied(key, heads_of)
        handle.load({**handle.state(), **state})
        self.handles[key] = handle, heads_of

    def _applied(self, key: RemedyKey, heads_of: SiteHeads) -> Handle:
        remedy = dataclasses.replace(
            parse_remedies(key[0])[0], heads=tuple(heads_of.items())
        )  # type: ignore[call-arg]
        return apply(
            self.model, remedy, self.optimizers[key[1]], sites=self.sites, partial=True
        )

    def _refusal(self, key: RemedyKey, heads_of: SiteHeads) -> str:
        """Returns why these heads refuse a remedy, or "" if they accept it; the remedy is removed again."""
        try:
            self._applied(key, heads_of).remove()
        except QkeelError as error:
            return str(error)
        return ""

    def insert_norm(self, spec: str) -> str:
        """Replaces all remedies by a norm with fitted gains throughout the model, once; returns why it is refused, or
        "".

        The gains are added to the first optimizer that accepts them.
        """
        before = [
            (key, heads_of, handle.state())
            for key, (handle, heads_of) in self.handles.items()
        ]
        self.remove()
        reasons = []
        for optimizer in self.optimizers:
            try:
                # Without balance, only gains are changed, so that a removal leaves the weights as they were trained.
                config = RetrofitConfig(balance=False)
                self.norm = (
                    spec,
                    retrofit(
                        self.model,
                        spec,
                        [self.batch],
                        optimizer=optimizer,
                        config=config,
                    ),
                )
                return ""
            except QkeelError as error:
                reasons.append(str(error))
        for key, heads_of, state in before:
            self.put_on(key, heads_of, state)
        return reasons[0]

    def remove(self, *, norm: bool = True) -> None:
        """Removes everything, the latest change first; norm=False keeps a norm, which is part of the trained model."""
        while self.handles:
            self.handles.popitem()[1][0].remove()
        if norm and self.norm is not None:
            self.norm[1].remove()
            self.norm = None

    @property
    def together(self) -> Handle:
        """One handle for the state of all that is applied, in an order that does not depend on when it was applied."""
        handles = [self.handles[key][0] for key in sorted(self.handles)]
        return compose(handles if self.norm is None else [*handles, self.norm[1]])


# The handle calls the policy after each measured step and carries out its decisions.

EVERY = 10  # steps
WITH_REMEDY = (Action.CLIP, Action.RATES, Action.NORM)
FIELDS = ("max_logit", "entropy")  # the fields per head that the policy reads
_OFF = (
    "the autopilot failed and changes nothing further: {}. Remedies that it has applied stay active until remove(); "
    "training continues"
)


@final
class Autopilot(Handle):
    """Watches a training run and carries out the decisions of its policy; created by `qkeel.autopilot`.

    `remove()` undoes everything and stops watching. `close()` stops watching and removes remedies for optimizer steps,
    but keeps a norm, because the model was trained with it. `decisions` and `refused` list what the policy decided and
    what sites refused; `events` lists every action, as the run's event log does. To checkpoint the autopilot, save its
    `state_dict()`, and after loading the checkpoint pass it to `load_state_dict()` before the next step.

    The policy bases its decisions on the measurements of step s and makes them when step s + 1 is complete. By then,
    the measurements have arrived from the device and from all processes, so that no waiting is needed and every process
    has the same lag. Decisions take effect after all hooks of step s + 1 have run, never within a step of the first
    optimizer. Until the first action, training is bit-identical to that of a watched run.
    """

    def __init__(
        self,
        monitor: Monitor,
        optimizers: Sequence[Optimizer],
        ladder: Ladder,
        spec: str,
        batch: object,
    ):
        self.monitor, self.ladder, self.spec, self.batch = monitor, ladder, spec, batch
        self.optimizers = list(optimizers)
        self.decisions: list[Decision] = []
        self.refused: list[Refused] = []
        self.events: list[Row] = []
        self.warns = True  # whether each decision raises a warning, as alarms do
        self.recording = Recording(planned=monitor.history.planned)
        self.sites: tuple[SiteFacts, ...] | None = None  # None until the first record
        self.remedies = ActiveRemedies(monitor.model, self.optimizers, batch)
        self._carried: Sample | None = (
            None  # measured before a checkpoint; the decision is made after it
        )
        self._scheduled = Handle(lambda: None)
        self._guard = FaultGuard(_OFF, self._stop)
        self._stopped = False
        self._hooks = StepHooks(
            None, lambda o: self._guard(self._after, o), self.optimizers[0]
        )
        super().__init__(self._take_off, state=self._state, load=self._load)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model, before the first record.

        Raises:
            InvalidValueError: the policy has already started.
        """
        optimizer = innermost(optimizer)
        if any(optimizer is known for known in self.optimizers):
            return
        if self.sites is not None:
            raise InvalidValueError(
                "the policy has already started; pass all optimizers to the autopilot at once"
            )
        self.optimizers.append(optimizer)

    def state_dict(self) -> State:
        """Returns the state as tensors by name, for a checkpoint."""
        return self.state()

    def load_state_dict(self, state: State) -> None:
        """Continues from a state that `state_dict()` returned; call it before the first step.

        If a norm was active, it is added again with new gains; to restore the gains, load the state dicts of the model
        and of the optimizer afterwards.

        Raises:
            InvalidValueError: the state is not that of an autopilot with this policy.
            RefusedError: remedies were active and the sites are not known; pass a batch to the autopilot.
        """
        self.load(state)

    def close(self, *, complete: bool = True) -> None:
        """Stops watching, as `Monitor.close` does; `complete` says whether training ended as planned."""
        if complete:
            self.monitor.training_over()  # before the remedies are removed
        self._end()
        self.remedies.remove(norm=False)
        self.monitor.close(complete=complete)

    def __exit__(self, *exc: object) -> None:
        self.close(complete=exc[0] is None)
        self.remove()

    def _take_off(self) -> None:
        self._end()
        self.remedies.remove()
        self.monitor.remove()

    def _end(self) -> None:
        """Handles the record of the last step, for which no further step follows, and stops."""
        if (
            not self._stopped
            and self.sites is not None
            and (last := self._next_sample(lag=0)) is not None
        ):
            self._guard(self._see, last)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        self._hooks.remove()
        # Hooks cannot be removed within a step; they remain, without effect, until remove() is called again.
        if not stepping():
            self._scheduled.remove()

    def _after(self, optimizer: Optimizer) -> None:
        """Called by a hook after a step of the first optimizer."""
        self._scheduled.remove()
        if self._stopped or not self.monitor.active:
            return
        # The first record is handled without lag, so that a checkpoint right after it contains the sites.
        sample = self._next_sample(lag=0 if self.sites is None else 1)
        if sample is not None:
            act = lambda _: self._guard(self._act, sample)  # noqa: E731
            self._scheduled = when_hooks_are_done(optimizer, act)

    def _next_sample(self, *, lag: int) -> Sample | None:
        """Returns the next record to decide on, from at least `lag` steps before the last step, or None."""
        sample = self.monitor.sample_before(self.monitor.steps - lag) or self._carried
        steps = self.recording.history.steps
        return (
            sample
            if sample is not None and (not len(steps) or sample.step > steps[-1])
            else None
        )

    def _act(self, sample: Sample) -> None:
        """Handles the record and carries out decisions; called after all hooks of the step have run."""
        if self.sites is None:
            self._begin(sample)
            return
        self._see(sample)
        for action, site, reason in self.remedies.set(
            active_actions(self.decisions, self.refused)
        ):
            steps = [
                d.step
                for d in self.decisions
                if (d.action, d.site, d.release) == (action, site, False)
            ]
            refusal = Refused(
                step=steps[-1], action=str(action), site=site, reason=reason
            )
            self.refused.append(refusal)
            self._note(
                {
                    "event": "refused",
                    **dataclasses.asdict(refusal),
                    "text": f"refused {action}: {reason}",
                }
            )

    def _begin(self, sample: Sample) -> None:
        """Starts on the sites of the first record, and finds out what they refuse."""
        sites = {site.name: site for site in self.monitor.sites}
        facts = []
        for name in sample.layers:
            site = sites.get(name)
            unknown = "this process did not find it" if site is None else ""
            if site is not None and not site.verified:
                unknown = site.unverified or site.why or "its weights are not known"
            n = sample.heads["max_logit"].shape[1] if site is None else site.n_heads
            facts.append(SiteFacts(name=name, n_heads=n, unknown=unknown))
        missed = [str(call) for call in self.monitor.missed]
        # All processes must agree on the sites, or their policies would decide differently.
        dist.agree("qkeel.autopilot", lambda: (facts, missed), repr)
        self._start(facts, list(sites.values()))
        for action, place, reason in self.remedies.try_all():
            self.refused.append(
                Refused(step=-1, action=str(action), site=place, reason=reason)
            )
        unverified = [
            f"{site.name}: {site.unknown}" for site in facts if site.unknown
        ] + missed
        text = f"autopilot with the policy {self.spec}"
        if unverified:
            text += (
                f". It does not act on unverified attention: {'; '.join(unverified)}"
            )
            if dist.rank() == 0:
                caution(text)
        refusals = [
            {"action": r.action, "site": r.site, "reason": r.reason}
            for r in self.refused
        ]
        self._note(
            {
                "event": "autopilot",
                "policy": self.spec,
                "refusals": refusals,
                "text": text,
                "step": sample.step,
            }
        )

    def _start(
        self, facts: Sequence[SiteFacts], sites: Sequence[AttentionSite]
    ) -> None:
        self.sites = tuple(facts)
        self.recording.layers = tuple(site.name for site in facts)
        self.remedies.know(sites)

    def _see(self, sample: Sample) -> None:
        """Records a sample and calls the policy."""
        assert self.sites is not None
        if not self.remedies.sites:
            self.remedies.know(self.monitor.sites)
        heads = {
            name: values for name, values in sample.heads.items() if name in FIELDS
        }
        self.recording.append({**sample.values, "step": sample.step}, heads)
        records = Records(
            history=self.recording.history,
            sites=self.sites,
            decisions=tuple(self.decisions),
            refused=tuple(self.refused),
        )
        decisions = self.ladder.decide(records)
        for decision in decisions:
            self.decisions.append(decision)
            self._note(decision.row())
            if self.warns and dist.rank() == 0:
                caution(str(decision), AlarmWarning)
        if decisions:
            closer, _ = active_actions(self.decisions, self.refused).get(
                (Action.WATCH, None), ("", ())
            )
            self.monitor.closer = (
                int(parse(closer)[0].options["every"]) if closer else None
            )

    def _note(self, row: Row) -> None:
        self.events.append(row)
        self.monitor.event(row)

    # The state contains tensors by name, which every checkpoint format can store. Nothing is pickled.

    def _state(self) -> State:
        state: State = {
            f"monitor/{name}": value for name, value in self.monitor.state().items()
        }
        facts: Row = {"policy": self.spec, "begun": self.sites is not None}
        if (sample := self._next_sample(lag=0)) is not None:
            state |= {
                f"coming/{name}": torch.from_numpy(x.copy())
                for name, x in sample.heads.items()
            }
            facts["coming"] = {
                "step": sample.step,
                "values": dict(sample.values),
                "layers": sample.layers,
            }
        if self.sites is not None:
            state |= {
                f"records/{name}": torch.from_numpy(x.copy())
                for name, x in self.recording.state().items()
            }
            state |= {
                f"remedy/{name}": value
                for name, value in self.remedies.together.state().items()
            }
            facts |= {
                "sites": [dataclasses.asdict(site) for site in self.sites],
                "decisions": [decision.row() for decision in self.decisions],
                "refused": [dataclasses.asdict(refusal) for refusal in self.refused],
                "closer": self.monitor.closer,
                "optimizers": len(self.optimizers),
                "events": self.events,
            }
        text = json.dumps(facts, default=list).encode()
        return {**state, "about": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def _load(self, state: State) -> None:
        if self.sites is not None:
            raise InvalidValueError(
                "training has already begun; load the state of an autopilot right after creating it"
            )
        try:
            facts = json.loads(bytes(state["about"].cpu().numpy()).decode())
            spec, begun = facts["policy"], facts["begun"]
        except (KeyError, ValueError, AttributeError) as error:
            raise InvalidValueError(
                f"expected the result of an autopilot's state_dict(), got {list(state)[:5]}"
            ) from error
        if spec != self.spec:
            raise InvalidValueError(
                f"expected the state of the policy {self.spec}, got the state of {spec}"
            )
        if begun:
            self._resume(facts, state)
        self.monitor.load(under("monitor/", state))

    def _resume(self, facts: Row, state: State) -> None:
        count = facts.get(
            "optimizers", len(self.optimizers)
        )  # states of earlier versions lack it
        if count != len(self.optimizers):
            raise InvalidValueError(
                f"expected the state of an autopilot of {len(self.optimizers)} optimizers, got one of {count}"
            )
        decisions, refused = (
            [Decision.of(row) for row in facts["decisions"]],
            [Refused(**row) for row in facts["refused"]],
        )
        active = active_actions(decisions, refused)
        needs_sites = any(action in WITH_REMEDY for action, _ in active)
        self._start(
            [SiteFacts(**row) for row in facts["sites"]],
            self._known_sites() if needs_sites else [],
        )
        self.decisions, self.refused = decisions, refused
        if (coming := facts.get("coming")) is not None:
            heads = {name: np.asarray(x) for name, x in under("coming/", state).items()}
            self._carried = Sample(
                **coming | {"layers": tuple(coming["layers"])}, heads=heads
            )
        self.recording.load(
            {name: np.asarray(x) for name, x in under("records/", state).items()}
        )
        self.events, self.monitor.closer = list(facts["events"]), facts["closer"]
        try:
            for action, _, reason in self.remedies.set(active):
                raise RefusedError(
                    f"expected to restore {action}, which was active, but it is refused: {reason}"
                )
            self.remedies.together.load(under("remedy/", state))
        except QkeelError:
            self.remedies.remove()
            raise

    def _known_sites(self) -> list[AttentionSite]:
        """Returns the sites if they are known without a training pass.

        Raises:
            RefusedError: the sites are not known.
        """
        if self.monitor.sites:
            return list(self.monitor.sites)
        try:
            return list(find_sites(self.monitor.model, self.batch))
        except RefusedError as error:
            raise RefusedError(
                "expected a batch to restore the remedies that were active or decided: pass batch=batch to "
                "the autopilot or the callback, with a batch that the model accepts"
            ) from error


@accepts_earlier_calls()
def autopilot(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Ladder = "ladder",
    planned: PlannedRates | None = None,
    sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
    every: int | Cadence = EVERY,
    query_mask: MaskSource | None = None,
    batch: object = None,
) -> Autopilot:
    """Watches a training run and limits the logits of the heads that need it with the cheapest remedy that suffices.

    Until its first action, training is bit-identical to training without it. Every process of a run must call it.

    Args:
        model: see `qkeel.watch`.
        optimizer: the optimizer or optimizers of the model; only the steps of the first one are counted.
        policy: "ladder", with options if needed ("ladder:threshold=50,allow_new_parameters=true"), or a Ladder.
        planned: the learning rates of the run, if known; they let the autopilot act earlier.
        sinks: where records and events are written; see `qkeel.watch`.
        every: at which steps the run is measured while there is no problem; see `qkeel.watch`.
        query_mask: which query rows count; see `qkeel.watch`.
        batch: an input that the model accepts; needed for a calibrated norm and to resume with active remedies.

    Returns:
        The Autopilot, a context manager with `events`, `decisions`, `state_dict()`, `load_state_dict()` and `close()`;
        `remove()` undoes everything.

    Raises:
        InvalidTypeError: there is no optimizer, or `optimizer` has the wrong type.
        UnknownNameError: the policy or an option does not exist.
        QkeelError: `qkeel.watch` or `find_sites` fails.

    >>> import torch
    >>> from qkeel.nn import Attention
    >>> model = Attention(d_model=8, n_heads=2)
    >>> with autopilot(model, torch.optim.AdamW(model.parameters())) as pilot:
    ...     pilot.decisions
    []
    """
    optimizers, ladder = _optimizers(optimizer), named_policy(policy)
    sites = None
    if batch is not None and isinstance(model, nn.Module):
        sites = find_sites(unwrapped(model), batch)
    monitor = watch(
        model,
        optimizers[0],
        every=every,
        sinks=sinks,
        query_mask=query_mask,
        planned=planned,
        sites=sites,
    )
    return Autopilot(
        monitor,
        optimizers,
        ladder,
        policy if isinstance(policy, str) else repr(ladder),
        batch,
    )


@accepts_earlier_calls()
def attach(
    monitor: Monitor,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Ladder = "ladder",
    batch: object = None,
) -> Autopilot:
    """Adds an autopilot to a model that is already watched, before its first step; the autopilot will close the
    monitor.

    Args:
        monitor: a monitor created with this optimizer, or with the first of several.
        optimizer: the optimizer or optimizers of the model.
        policy: see `autopilot`.
        batch: see `autopilot`.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        UnknownNameError: the policy or an option does not exist.
        InvalidValueError: the monitor has already recorded training steps.

    >>> import torch
    >>> from qkeel.nn import Attention
    >>> model = Attention(d_model=8, n_heads=2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> attach(watch(model, optimizer), optimizer).remove()
    """
    optimizers, ladder = _optimizers(optimizer), named_policy(policy)
    if not isinstance(monitor, Monitor):
        raise InvalidTypeError(
            f"expected the Monitor that qkeel.watch returns, got {type(monitor).__name__}"
        )
    if monitor.history.phase == "train" and len(monitor.history):
        raise InvalidValueError(
            "expected a monitor that has recorded nothing yet; attach the autopilot before training"
        )
    return Autopilot(
        monitor,
        optimizers,
        ladder,
        policy if isinstance(policy, str) else repr(ladder),
        batch,
    )


def _optimizers(optimizer: object) -> list[Optimizer]:
    if optimizer is None:
        raise InvalidTypeError(
            "expected the optimizer that updates the model: qkeel.autopilot(model, optimizer)"
        )
    return [innermost(candidate) for candidate in listed(optimizer)]


class _Callable(ModuleType):
    # The public name qkeel.autopilot is both this module and the function that starts an autopilot.
    __call__ = staticmethod(autopilot)


sys.modules[__name__].__class__ = _Callable
