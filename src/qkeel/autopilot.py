"""AUTOPILOT: watches a training run, decides at each record which heads need a remedy, and applies it.

In the order of the file: what a decision is; the policy "ladder", a pure function from the records of a run to the
decisions of one step; the remedies that it switches on and off; and the handle that calls the one and the other.

Shapes: n records; [layers heads] for one record, [n layers heads] for series. Values of heads that a layer does not
have, or that were not measured, are NaN.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Self, final

import numpy as np
import safetensors.torch
import torch
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
from qkeel.metrics import Row
from qkeel.monitor import Cadence, PlannedRates, Sink, thresholds
from qkeel.monitor.forecast import Forecast
from qkeel.monitor.history import History, Recording, thinned
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.rules import (
    WORDS,
    Alarm,
    Approach,
    Ceiling,
    EntropyCollapse,
    Growth,
    Outlook,
    Rule,
    Severity,
    ahead,
    judged_series,
    measured,
    outgrowing,
    signs,
    widest_spread,
)
from qkeel.monitor.sample import Sample
from qkeel.monitor.token_classes import MaskSource
from qkeel.monitor.watch import watch
from qkeel.options import Count, Positive, build, lookup, parse, settle
from qkeel.patching.forward import unwrapped
from qkeel.patching.guards import FaultGuard
from qkeel.patching.optimizers import StepHooks, listed, stepping, when_hooks_are_done
from qkeel.remedies import apply
from qkeel.remedies import parse as parse_remedies
from qkeel.remedies.next_pass import AtNextPass
from qkeel.remedies.optimizer_trials import innermost
from qkeel.remedies.saved_state import GroupEntry
from qkeel.sites.find import find_sites
from qkeel.sites.site import AttentionSite

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

    WATCH: measure more often. CLIP: qk_clip on heads. RATES: lalr, lower rates for the q and k weights of heads. NONE: no
    action is left.

    >>> Action("qk_clip") is Action.CLIP
    True
    """

    WATCH = "watch_closer"
    CLIP = "qk_clip"
    RATES = "lalr"
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
    site: str | None  #: name of the site; None for all
    reason: str  #: error message of the refusal


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An action at one site, or the end of the closer watch.

    >>> decision = Decision(step=40, action=Action.CLIP, site="attn", heads=(1,), rule="", reason="max logit 120")
    >>> print(decision)
    autopilot at step 40, attn, head 1: qk clip: max logit 120
    """

    step: int  #: number of completed optimizer steps at the decision
    action: Action  #: the action to take or to release
    site: str | None = None  #: name of the site; None for the whole model
    heads: tuple[int, ...] = ()  #: the heads to act on; empty for all heads
    #: string that specifies the remedy; "" if the action is not a remedy
    remedy: str = ""
    release: bool = False  #: whether this decision ends the action
    rule: str  #: name of the rule that raised it
    forecast: Forecast | None = None  #: forecast of the largest logit, if available
    reason: str  #: the reason, in words

    def __str__(self) -> str:
        """One sentence that states when, where, what and why."""
        text = f"autopilot at step {self.step:,}"
        if self.site is not None:
            text += f", {self.site or 'the model itself'}"
        if self.heads:
            text += f", head{'s' if len(self.heads) > 1 else ''} {', '.join(map(str, self.heads))}"
        action = self.remedy or self.action.replace("_", " ")
        text += (
            f": {f'releases {self.action}' if self.release else action}: {self.reason}"
        )
        # An alarm's reason may state the same forecast.
        if self.forecast is not None and str(self.forecast) not in self.reason:
            text += f"; the largest {self.forecast}"
        return text

    def row(self) -> Row:
        """The decision as a line of events.jsonl."""
        fields = dataclasses.asdict(self)
        fields |= {"action": str(self.action), "heads": list(self.heads)}
        return {"event": "decision", **fields, "text": str(self)}

    @classmethod
    def of(cls, row: Row) -> Self:
        """The decision of which `row` is the line."""
        fields = {field.name: row[field.name] for field in dataclasses.fields(cls)}
        fields |= {"action": Action(row["action"]), "heads": tuple(row["heads"])}
        if row["forecast"] is not None:
            fields["forecast"] = Forecast(**row["forecast"])
        return cls(**fields)


# The active actions by (action, site): the remedy and its heads (empty for all heads).
Active = dict[tuple[Action, str | None], tuple[str, tuple[int, ...]]]


def active_actions(
    decisions: Sequence[Decision], refused: Sequence[Refused] = ()
) -> Active:
    """Returns the actions that are active after these decisions, with their remedies and heads.

    A decision that was refused when its step came has no effect.

    >>> rates = Decision(step=1, action=Action.RATES, site="a", remedy="lalr", rule="", reason="")
    >>> active_actions([rates])
    {(<Action.RATES: 'lalr'>, 'a'): ('lalr', ())}
    """
    # A refusal belongs to the decision of its own step: the site may accept a later one.
    not_taken = {(refusal.step, refusal.action, refusal.site) for refusal in refused}
    active: Active = {}
    for decision in decisions:
        key = (decision.action, decision.site)
        _, heads = active.get(key, ("", decision.heads))
        if decision.release:
            active.pop(key, None)
        elif (decision.step, str(decision.action), decision.site) not in not_taken:
            joined = {*heads, *decision.heads} if heads and decision.heads else ()
            active[key] = decision.remedy, tuple(sorted(joined))
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


def _crossing(history: History) -> Forecast | None:
    """Forecasts when the largest logit crosses the next alarm threshold; None if it will not."""
    top = widest_spread(history)
    for threshold in (thresholds.CLIPS, thresholds.HARMS, thresholds.DIVERGES):
        if top is not None and top.value < threshold:
            return ahead(history, top.envelope, threshold)
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Escalates per head and site: watch closer, then qk_clip or lalr.

    *Watch closer* measures every `every` steps, during the first `calm` records, while an action is active, and while a
    head is rising: its logit is over 8 nats, has doubled, and is forecast to end above `limit`. *qk_clip* at
    `threshold` starts when a head is rising or an alarm of RULES fires. It is applied to the heads that are rising or
    over the threshold, and to the head that the alarm names. Its steps are matched, unless the site refuses lalr, as it
    does if steps cannot be scaled. *lalr* takes its place at sites that refuse qk_clip. A site is reported once, with
    *nothing left*, if it refuses both, or if after 2 · `patience` records its logit exceeds three times the threshold
    in spite of the remedy, or its entropy is below 0.05 nats.

    A remedy stays until the end of the run, because matched steps would become long again without it. The closer watch
    ends after `calm` records in which nothing grows and no action is active.

    >>> Ladder(threshold=50.0).patience
    3
    """

    threshold: Positive = 15.0
    limit: Positive = thresholds.CLIPS
    tau: Positive = 0.1
    every: Count = 2
    patience: Count = 3
    calm: Count = 20

    def __post_init__(self) -> None:
        settle(self, "the policy ladder")

    def decide(self, records: Records) -> tuple[Decision, ...]:
        """Returns the decisions for the step of the last record: all actions for which there is a reason.

        It depends on the records alone, so that every process of a run, and a run that was resumed, decide alike.
        """
        history = records.history
        if not len(history) or "max_logit" not in history.heads:
            return ()
        step = _Step(self, records)
        alarm = None
        # The first rule that fires gives the reason: RULES has those that look ahead before those that look back.
        for rule in RULES:
            alarm = alarm or rule.check(history)
        return (*step.watch(), *step.clips(alarm), *step.not_enough())


class _Step:
    """The reasons for decisions at one step; a new object per step, so no state carries over."""

    def __init__(self, ladder: Ladder, records: Records) -> None:
        self.ladder, self.records, self.history = ladder, records, records.history
        # As the rules judge them: by how far they spread.
        logits = judged_series(self.history)
        assert logits is not None
        self.logits = logits[-1]
        spreads = measured(self.history, "logit_spread")[-1]
        self.signs = signs(self.history, ladder.threshold)
        self.word = WORDS["max_logit" if np.isnan(spreads).all() else "logit_spread"]
        self.active = active_actions(records.decisions, records.refused)
        numbered = enumerate(records.sites)
        self.sites = {i: site for i, site in numbered if not site.unknown}
        self.rising = outgrowing(self.history, logits, ladder.limit)
        n = self.n_rising = int(self.rising[list(self.sites)].sum())
        heads = "the logit of 1 head has" if n == 1 else f"the logits of {n} heads have"
        self.outlook = f"{heads} doubled and may end over {ladder.limit:g}"

    def decision(
        self,
        action: Action,
        site: str | None,
        rule: str,
        reason: str,
        heads: tuple[int, ...] = (),
        *,
        release: bool = False,
    ) -> Decision:
        """Builds a decision for this step, with the remedy that the action applies at the site, or has applied."""
        ladder = self.ladder
        # Matched steps scale steps as lalr does, so who refuses the one refuses the other.
        matched = "" if self.records.refuses(Action.RATES, site) else ",steps=matched"
        remedies = {
            Action.WATCH: f"watch:every={ladder.every}",
            Action.CLIP: f"qk_clip:threshold={ladder.threshold:g}{matched}",
            Action.RATES: f"lalr:tau={ladder.tau:g}",
        }
        remedy, _ = self.active.get((action, site), (remedies.get(action, ""), ()))
        return Decision(
            step=self.records.step,
            action=action,
            site=site,
            heads=heads,
            remedy=remedy,
            release=release,
            rule=rule,
            forecast=None if release else _crossing(self.history),
            reason=reason,
        )

    def watch(self) -> list[Decision]:
        """Measures more often at the start, where logits change most, and while they grow; then returns to normal."""
        if (Action.WATCH, None) not in self.active:
            if not self.sites or not (self.n_rising or len(self.history) == 1):
                return []
            reason = self.outlook if self.n_rising else "the run begins"
            return [self.decision(Action.WATCH, None, "outlook of each head", reason)]
        since = self._records_since(Action.WATCH, None)
        # An active remedy is watched closely as long as it acts.
        if self.n_rising or len(self.active) > 1 or since < self.ladder.calm:
            return []
        reason = "nothing grows and no action is active"
        rule = "no longer needed"
        return [self.decision(Action.WATCH, None, rule, reason, release=True)]

    def clips(self, alarm: Alarm | None) -> list[Decision]:
        """Clips the heads that rise or that an alarm concerns and, at clipped sites, all heads over the threshold."""
        is_begun = self.n_rising > 0 or alarm is not None
        decisions = []
        for i, site in self.sites.items():
            _, clipped = self.active.get((Action.CLIP, site.name), ("", None))
            is_held = (Action.RATES, site.name) in self.active
            if is_held or (clipped is None and not is_begun):
                continue
            high = self.logits[i] > self.ladder.threshold
            high = high | self.rising[i] if is_begun else high
            heads = set(np.flatnonzero(high[: site.n_heads]).tolist())
            # `fmax` passes over the NaN of heads that this layer does not have.
            largest = f"{self.word} {float(np.fmax.reduce(self.logits[i])):,.4g}"
            rule, reason = "outlook of each head", f"{largest}; {self.outlook}"
            if alarm is not None:
                rule, reason = alarm.rule, alarm.meaning
                if alarm.layer == site.name:
                    every = range(site.n_heads)
                    heads |= {*every} if alarm.head is None else {alarm.head}
                else:
                    reason = (
                        f"{largest} here, and at {alarm.layer or 'the model'}: {reason}"
                    )
            elif not self.n_rising:
                rule = "over the threshold"
                reason = f"{largest} at a site that is already clipped"
            heads -= set(clipped or ())
            if not heads:
                continue
            refusals = []
            of_heads = {head: self.signs[i, head] for head in sorted(heads)}
            lifted = [head for head, sign in of_heads.items() if sign > 0]
            is_lowered = set(of_heads.values()) == {-1}
            is_shifted = not clipped and (bool(lifted) or is_lowered)
            for action in (Action.CLIP, Action.RATES):
                refusal = self.records.refuses(action, site.name)
                if action is Action.CLIP and is_shifted:
                    head = (*lifted, *of_heads)[0]
                    refusal = f"a constant decides on the largest logit of head {head}"
                if refusal:
                    refusals.append(f"{action}: {refusal}")
                    continue
                # lalr acts on a whole site, so it gets no list of heads. It is tried only where a clip is refused: beside a
                # clip, its rates would rise as the clip shrinks the weights, and undo the matched steps.
                chosen = tuple(sorted(heads)) if action is Action.CLIP else ()
                decisions.append(self.decision(action, site.name, rule, reason, chosen))
                break
            else:
                decisions += self.nothing_left(site.name, rule, reason, refusals)
        return decisions

    def not_enough(self) -> list[Decision]:
        """Says at which sites the active action is not enough."""
        decisions = []
        entropies = self.history.series("entropy")
        for i, site in self.sites.items():
            held = [
                a for a in (Action.RATES, Action.CLIP) if (a, site.name) in self.active
            ]
            wait = 2 * self.ladder.patience
            if not held or self._records_since(held[0], site.name) < wait:
                continue
            largest, entropy = float(np.fmax.reduce(self.logits[i])), np.nan
            # numpy warns of a mean of nothing.
            if entropies is not None and np.isfinite(entropies[-1, i]).any():
                entropy = float(np.nanmean(entropies[-1, i].astype(np.float64)))
            reason = ""
            if largest > 3 * self.ladder.threshold:
                reason = f"its {self.word} is {largest:.4g} under {held[0]}"
            elif entropy < thresholds.ENTROPY:
                reason = f"its mean attention entropy is {entropy:.3g} nats"
            if reason:
                decisions += self.nothing_left(site.name, "not enough", reason, [])
        return decisions

    def nothing_left(
        self, site: str, rule: str, reason: str, refusals: Sequence[str]
    ) -> list[Decision]:
        """Says once that no action is left for a site, and why each was refused."""
        if (Action.NONE, site) in self.active:
            return []
        reason = "; ".join([f"{reason}, and no other action is left", *refusals])
        return [self.decision(Action.NONE, site, rule, reason)]

    def _records_since(self, action: Action, site: str | None) -> int:
        """Returns the number of records since the last decision for this action at this site (None for the model)."""
        # If there was no such decision, every record counts.
        steps = [-1]
        for d in self.records.decisions:
            if not d.release and (d.action, d.site) == (action, site):
                steps.append(d.step)
        return int((self.history.steps > max(steps)).sum())


def named_policy(spec: str | Ladder) -> Ladder:
    """Returns the policy that a string specifies, or the given policy itself.

    Args:
        spec: "ladder", with options if needed ("ladder:threshold=50"), or a Ladder.

    Raises:
        UnknownNameError: the policy or an option does not exist.
        InvalidTypeError: `spec` is neither a string nor a Ladder.

    >>> named_policy("ladder:threshold=50").threshold
    50.0
    """
    if isinstance(spec, Ladder):
        return spec
    if not isinstance(spec, str):
        raise InvalidTypeError(
            f"expected the name of a policy or a Ladder, got {type(spec).__name__}"
        )
    term, *further_terms = parse(spec)
    if further_terms:
        raise InvalidValueError(
            f"expected one policy, got {1 + len(further_terms)} in {spec!r}"
        )
    policy = lookup("policy", {"ladder": Ladder}, term.name)
    return build("policy 'ladder'", policy, term.options)


# The remedies of a run. No other code in this file changes the model.

# Heads by site, where () stands for all heads.
SiteHeads = dict[str, tuple[int, ...]]
Refusals = list[tuple[Action, str | None, str]]


@final
class ActiveRemedies:
    """The remedies that are applied, with one handle for each, by the string that specifies it.

    To change the heads of a remedy, its handle is removed and the remedy is applied again with the old state. If a site
    refuses, the previous remedies are restored, so that no remedy remains partially applied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        refused: Callable[[QkeelError], None],
    ) -> None:
        self.model, self.optimizers = model, optimizers
        # Called if a remedy that goes on after a resume is refused.
        self._refused = refused
        self.handles: dict[str, tuple[Handle, SiteHeads]] = {}
        # After a resume, the sites are found later, in the first pass.
        self.sites: list[AttentionSite] = []

    def try_all(self) -> Refusals:
        """Returns what sites refuse, which is determined by applying each remedy and removing it again; the model stays
        bit-identical."""
        refusals: Refusals = []
        for site in self.sites:
            for action in (Action.CLIP, Action.RATES) if site.verified else ():
                if reason := self._refusal(str(action), {site.name: ()}):
                    refusals.append((action, site.name, reason))
        return refusals

    def set(self, active: Active) -> Refusals:
        """Applies exactly the remedies that should be active; returns what was refused."""
        remedies: dict[str, SiteHeads] = {}
        for (action, site), (spec, heads) in active.items():
            if action in (Action.CLIP, Action.RATES) and site is not None:
                remedies.setdefault(spec, {})[site] = heads
        # What ends is removed before anything is applied, as two remedies on one weight refuse each other.
        for spec in self.handles.keys() - remedies.keys():
            self.handles.pop(spec)[0].remove()
        refusals: Refusals = []
        for spec, heads_of in remedies.items():
            handle, before = self.handles.get(spec, (None, {}))
            if before == heads_of:
                continue
            state = {} if handle is None else handle.state()
            if handle is not None:
                self.handles.pop(spec)[0].remove()
            accepted = heads_of
            # At least one site refuses: one by one.
            if self._refusal(spec, heads_of):
                accepted = {site: x for site, x in before.items() if site in heads_of}
                for site, heads in heads_of.items():
                    if reason := self._refusal(spec, {**accepted, site: heads}):
                        action = Action(parse(spec)[0].name)
                        refusals.append((action, site, reason))
                    else:
                        accepted[site] = heads
            if accepted:
                self.put_on(spec, accepted, state)
        return refusals

    def put_on(self, spec: str, heads_of: SiteHeads, state: State) -> None:
        """Applies a remedy to these heads, and restores its `state` as far as that knows them.

        Raises:
            QkeelError: a site refuses; in that case, nothing is changed.
        """
        (remedy,) = parse_remedies(spec)
        remedy = dataclasses.replace(remedy, heads=tuple(heads_of.items()))  # type: ignore[call-arg]
        if self.sites:
            handle = apply(
                self.model, remedy, self.optimizers, sites=self.sites, partial=True
            )
            handle.load({**handle.state(), **state})
        else:
            handle = AtNextPass(
                self.model,
                [remedy],
                self.optimizers,
                partial=True,
                refused=self._refused,
                begins=state,
            )
        self.handles[spec] = handle, heads_of

    def _refusal(self, spec: str, heads_of: SiteHeads) -> str:
        """Returns why these heads refuse a remedy, or "" if they accept it; the remedy is removed again."""
        try:
            self.put_on(spec, heads_of, {})
        except QkeelError as error:
            return str(error)
        self.handles.pop(spec)[0].remove()
        return ""

    def remove(self) -> None:
        """Removes everything, the latest change first."""
        while self.handles:
            self.handles.popitem()[1][0].remove()

    @property
    def together(self) -> Handle:
        """One handle for the state of all that is applied, in an order that does not depend on when it was applied."""
        return compose([self.handles[spec][0] for spec in sorted(self.handles)])


# The handle calls the policy after each measured step and carries out its decisions.

# Steps.
EVERY = 10
# The fields per head that the policy reads.
FIELDS = ("max_logit", "capped_max_logit", "logit_spread", "entropy")
#: What the records in an optimizer's checkpoint take at most, of the monitor and of the policy each: 512 records of 32 heads.
PACKED_BYTES = 1 << 19
_OFF = (
    "the autopilot failed and changes nothing further: {}. Remedies that it has applied stay active until remove(); "
    "training continues"
)

_OPEN_STEP = (
    "the state of the autopilot was read between two passes of one step, and it holds no numbers of the passes so far, so a "
    "training that goes on from it may decide otherwise. Save after optimizer.step()"
)


@final
class Autopilot(Handle):
    """Watches a training run and carries out the decisions of its policy; created by `qkeel.autopilot`.

    `remove()` undoes everything and stops watching, as `close()` does at the end of training. `decisions` and `refused`
    list what the policy decided and what sites refused; `events` lists every action, as the run's event log does. The
    first optimizer's checkpoints contain its state. Where a program does not save optimizers, save its `state_dict()`,
    and after loading the checkpoint pass it to `load_state_dict()` before the next step.

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
        # Whether each decision raises a warning, as alarms do.
        self.warns = True
        self.recording = Recording(planned=monitor.history.planned)
        # None until the first record.
        self.sites: tuple[SiteFacts, ...] | None = None
        self.remedies = ActiveRemedies(monitor.model, self.optimizers, self._give_up)
        # Measured before a checkpoint; the decision is made after it
        self._carried: Sample | None = None
        self._scheduled = Handle(lambda: None)
        self._guard = FaultGuard(_OFF, self._stop, forks=False)
        self._stopped = False
        self._has_warned_of_open_step = False
        self._hooks = StepHooks(
            None, lambda o: self._guard(self._after, o), self.optimizers[0]
        )
        super().__init__(self._take_off, state=self._state, load=self._load_state)
        # All optimizers have the entry, as any of them may get the state of a remedy while a checkpoint is read.
        self._entry = GroupEntry(self.optimizers, "autopilot", self._pack, self._take)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model, before the first record.

        Raises:
            InvalidValueError: the policy has already started.
        """
        optimizer = innermost(optimizer)
        if any(optimizer is numbered for numbered in self.optimizers):
            return
        if self.sites is not None:
            raise InvalidValueError(
                "the policy has already started; pass all optimizers to the autopilot at once"
            )
        self.optimizers.append(optimizer)
        self._entry.add(optimizer)

    def state_dict(self) -> State:
        """Returns the state as tensors by name, for a checkpoint."""
        return self.state()

    def load_state_dict(self, state: State) -> None:
        """Continues from a state that `state_dict()` returned; call it before the first step.

        Raises:
            InvalidValueError: the state is not that of an autopilot with this policy.
            RefusedError: remedies were active that these sites refuse.
        """
        self.load(state)

    def close(self, *, complete: bool = True) -> None:
        """Stops watching, as `Monitor.close` does; `complete` says whether training ended as planned."""
        self._end()
        self.remedies.remove()
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
        last = None if self._stopped or self.sites is None else self._next_sample(lag=0)
        if last is not None:
            self._guard(self._see, last)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        self._hooks.remove()
        self._entry.remove()
        # Hooks cannot be removed within a step; they remain, without effect, until remove() is called again.
        if not stepping():
            self._scheduled.remove()

    def _give_up(self, error: QkeelError) -> None:
        def fail() -> None:
            raise error

        self._guard(fail)

    def _after(self, optimizer: Optimizer) -> None:
        """Called by a hook after a step of the first optimizer."""
        self._scheduled.remove()
        if self._stopped or not self.monitor.active:
            return
        # The first record is handled without lag, so that a checkpoint right after it contains the sites.
        sample = self._next_sample(lag=0 if self.sites is None else 1)
        if sample is not None:
            self._scheduled = when_hooks_are_done(
                optimizer, lambda _: self._guard(self._act, sample)
            )

    def _next_sample(self, *, lag: int) -> Sample | None:
        """Returns the next record to decide on, from at least `lag` steps before the last step, or None."""
        sample = self.monitor.sample_before(self.monitor.steps - lag) or self._carried
        steps = self.recording.history.steps
        is_seen = sample is not None and len(steps) and sample.step <= steps[-1]
        return None if is_seen else sample

    def _act(self, sample: Sample) -> None:
        """Handles the record and carries out decisions; called after all hooks of the step have run."""
        if self.sites is None:
            self._begin(sample)
            return
        self._see(sample)
        active = active_actions(self.decisions, self.refused)
        for action, site, reason in self.remedies.set(active):
            key = (action, site, False)
            steps = [
                d.step for d in self.decisions if (d.action, d.site, d.release) == key
            ]
            refusal = Refused(
                step=steps[-1], action=str(action), site=site, reason=reason
            )
            self.refused.append(refusal)
            text = f"refused {action}: {reason}"
            self._note(
                {"event": "refused", **dataclasses.asdict(refusal), "text": text}
            )

    def _begin(self, sample: Sample) -> None:
        """Starts on the sites of the first record, and finds out what they refuse."""
        sites = {site.name: site for site in self.monitor.sites}
        facts = []
        for name in sample.layers:
            site = sites.get(name)
            if site is None:
                n = sample.heads["max_logit"].shape[1]
                unknown = "this process did not find it"
            else:
                n = site.n_heads
                why = site.unverified or site.why or "its weights are not known"
                unknown = "" if site.verified else why
            facts.append(SiteFacts(name=name, n_heads=n, unknown=unknown))
        missed = [str(call) for call in self.monitor.missed]
        # All processes must agree on the sites, or their policies would decide differently.
        dist.agree("qkeel.autopilot", lambda: (facts, missed), repr)
        self._start(facts, list(sites.values()))
        for action, site, reason in self.remedies.try_all():
            refusal = Refused(step=-1, action=str(action), site=site, reason=reason)
            self.refused.append(refusal)
        unverified = [f"{x.name}: {x.unknown}" for x in facts if x.unknown] + missed
        text = f"autopilot with the policy {self.spec}"
        if unverified:
            text += (
                f". It does not act on unverified attention: {'; '.join(unverified)}"
            )
            if dist.rank() == 0:
                caution(text)
        refusals = [dataclasses.asdict(refusal) for refusal in self.refused]
        about = {"policy": self.spec, "refusals": refusals, "text": text}
        self._note({"event": "autopilot", **about, "step": sample.step})

    def _start(
        self, facts: Sequence[SiteFacts], sites: Sequence[AttentionSite]
    ) -> None:
        self.sites = tuple(facts)
        self.recording.layers = tuple(site.name for site in facts)
        self.remedies.sites = list(sites)

    def _see(self, sample: Sample) -> None:
        """Records a sample and calls the policy."""
        assert self.sites is not None
        if not self.remedies.sites:
            self.remedies.sites = list(self.monitor.sites)
        heads = {name: x for name, x in sample.heads.items() if name in FIELDS}
        self.recording.append({**sample.values, "step": sample.step}, heads)
        records = Records(
            history=self.recording.history,
            sites=self.sites,
            decisions=tuple(self.decisions),
            refused=tuple(self.refused),
        )
        for decision in self.ladder.decide(records):
            self.decisions.append(decision)
            self._note(decision.row())
            if self.warns and dist.rank() == 0:
                caution(str(decision), AlarmWarning)
        self._measure_closer()

    def _measure_closer(self) -> None:
        """Lets the monitor measure more often from here on, while that is an active action."""
        is_closer = (Action.WATCH, None) in active_actions(self.decisions, self.refused)
        self.monitor.closer = self.ladder.every if is_closer else None

    def _note(self, row: Row) -> None:
        self.events.append(row)
        self.monitor.event(row)

    # The state contains tensors by name, which every checkpoint format can store. Nothing is pickled.

    def _state(self) -> State:
        if self.monitor.is_in_step and not self._has_warned_of_open_step:
            self._has_warned_of_open_step = True
            caution(_OPEN_STEP)
        facts: Row = {"policy": self.spec, "begun": self.sites is not None}
        arrays: dict[str, np.ndarray] = {}
        tensors = {f"monitor/{name}": x for name, x in self.monitor.state().items()}
        # Decisions come a step after the measurement, so a checkpoint may fall between the two.
        if (sample := self._next_sample(lag=0)) is not None:
            arrays |= {f"coming/{name}": x for name, x in sample.heads.items()}
            facts["coming"] = {
                "step": sample.step,
                "values": dict(sample.values),
                "layers": sample.layers,
            }
        if self.sites is not None:
            history = self.recording.state()
            arrays |= {f"records/{name}": x for name, x in history.items()}
            remedies = self.remedies.together.state()
            tensors |= {f"remedy/{name}": x for name, x in remedies.items()}
            facts |= {
                "sites": [dataclasses.asdict(site) for site in self.sites],
                "decisions": [decision.row() for decision in self.decisions],
                "refused": [dataclasses.asdict(refusal) for refusal in self.refused],
                "optimizers": len(self.optimizers),
                "events": self.events,
            }
        text = json.dumps(facts, default=list).encode()
        arrays["about"] = np.frombuffer(text, dtype=np.uint8)
        # `frombuffer` gives read-only memory, and the records are views of buffers that the run goes on filling.
        return tensors | {
            name: torch.from_numpy(x.copy()) for name, x in arrays.items()
        }

    def _pack(self) -> str:
        """The state as text, which every checkpoint keeps as one object.

        torch.distributed.checkpoint writes flat states of optimizers with one copy of it for every parameter, so records
        are thinned to PACKED_BYTES, and of the monitor's, those stay that the default rules read.
        """
        state = self._state()
        for head in ("monitor/journal/records/", "records/"):
            records = {name: x.numpy() for name, x in under(head, state).items()}
            if records:
                records = thinned(records, (*FIELDS, "softmax_gradient"), PACKED_BYTES)
            state = {name: x for name, x in state.items() if not name.startswith(head)}
            state |= {f"{head}{name}": torch.tensor(x) for name, x in records.items()}
        return base64.b64encode(safetensors.torch.save(state)).decode()

    def _take(self, packed: object) -> bool:
        """Continues from a state in the optimizer's checkpoint; returns False if there is none."""
        if not isinstance(packed, str):
            return False
        # An optimizer may load what it has just returned.
        if packed != self._pack():
            self._restore(safetensors.torch.load(base64.b64decode(packed)))
        return True

    def _load_state(self, state: State) -> None:
        self._restore(state)
        self._entry.is_known()

    def _restore(self, state: State) -> None:
        if self.monitor.sample_before(sys.maxsize) is not None:
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
        # Before the first record, optimizers may still be added, so a state of that time names no number.
        n_optimizers = facts.get("optimizers", len(self.optimizers))
        if spec != self.spec or n_optimizers != len(self.optimizers):
            raise InvalidValueError(
                f"expected the state of the policy {self.spec} with {len(self.optimizers)} optimizers, "
                f"got one of {spec} with {n_optimizers}"
            )
        if begun:
            self._resume(facts, state)
        self.monitor.load(under("monitor/", state))

    def _resume(self, facts: Row, state: State) -> None:
        decisions = [Decision.of(row) for row in facts["decisions"]]
        refused = [Refused(**row) for row in facts["refused"]]
        active = active_actions(decisions, refused)
        sites = list(self.monitor.sites)
        # With a batch, what was active is active at once; without, when the next pass has shown the sites.
        if not sites and self.batch is not None:
            sites = list(find_sites(self.monitor.model, self.batch))
        self._start([SiteFacts(**row) for row in facts["sites"]], sites)
        self.decisions, self.refused = decisions, refused
        coming, history = (
            {name: np.asarray(x) for name, x in under(head, state).items()}
            for head in ("coming/", "records/")
        )
        if (about := facts.get("coming")) is not None:
            about["layers"] = tuple(about["layers"])
            self._carried = Sample(**about, heads=coming)
        self.recording.load(history)
        self.events = list(facts["events"])
        self._measure_closer()
        # A resume that fails must not leave half of the remedies on the model.
        try:
            for action, _, reason in self.remedies.set(active):
                raise RefusedError(
                    f"expected to restore {action}, which was active, but it is refused: {reason}"
                )
            self.remedies.together.load(under("remedy/", state))
        except QkeelError:
            self.remedies.remove()
            raise


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
        policy: "ladder", with options if needed ("ladder:threshold=50,patience=5"), or a Ladder.
        planned: the learning rates of the run, if known; they let the autopilot act earlier.
        sinks: where records and events are written; see `qkeel.watch`.
        every: at which steps the run is measured while there is no problem; see `qkeel.watch`.
        query_mask: which query rows count; see `qkeel.watch`.
        batch: an input that the model accepts, in which attention is found at once, and not in the first pass.

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
    optimizers = _optimizers(optimizer)
    # Refused before anything is watched.
    named_policy(policy)
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
    return attach(monitor, optimizers, policy=policy, batch=batch)


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
    spec = policy if isinstance(policy, str) else repr(ladder)
    return Autopilot(monitor, optimizers, ladder, spec, batch)


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
