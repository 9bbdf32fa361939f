"""Runs a policy record by record, replays it on recorded runs, and applies its decisions to the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot.policy import (
    Action,
    ActiveActions,
    Decision,
    DecisionEffect,
    Policy,
    Records,
    Refused,
    SiteFacts,
    active_actions,
)
from qkeel.autopilot.policy import policy as known_policy
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import DamagedFileError, InvalidTypeError, InvalidValueError, QkeelError, RefusedError, caution
from qkeel.handle import Handle, State
from qkeel.heads.site import AttentionSite
from qkeel.metrics import Row
from qkeel.monitor.history import History, PlannedRates
from qkeel.monitor.recording import Recording
from qkeel.records import RunDirectory
from qkeel.remedies import apply, parse
from qkeel.remedies.lalr import LALR
from qkeel.remedies.qk_clip import QKClip
from qkeel.remedies.retrofit import Retrofit, RetrofitConfig, retrofit

# Running a policy record by record; this code is used both in training and in a replay.

LATER = 5  # the effect of a decision is measured this many records later
_WITH_EFFECT = (Action.CLIP, Action.RATES, Action.NORM)


@final
class PolicyRunner:
    """Calls a policy at each record. Its state is determined by the records and the refusals, so that it can be
    replayed.

    The policy must not act at sites whose weights are not verified, or on attention that was not recognized.
    """

    def __init__(self, policy: Policy, sites: Sequence[SiteFacts], missed: Sequence[str] = ()) -> None:
        self.policy, self.sites, self.missed = policy, tuple(sites), tuple(missed)
        self.decisions: list[Decision] = []
        self.refused: list[Refused] = []
        self.seen = 0  # the number of records
        # Pairs: the index of the record at which an effect is due, and the index of its decision.
        self.waiting: list[tuple[int, int]] = []

    def see(self, history: History) -> tuple[list[Decision], list[DecisionEffect]]:
        """Returns the decisions at the last record, and the effects of earlier decisions that are due now.

        Raises:
            InvalidTypeError: the policy returned something other than decisions.
            InvalidValueError: a decision is for another step, for an unknown or unverified site, or for heads that the
                site does not have.
        """
        self.seen += 1
        # Effects are computed before the policy decides, from the state that it will see.
        due = [number for at, number in self.waiting if at <= self.seen]
        self.waiting = [one for one in self.waiting if one[0] > self.seen]
        effects = [self._effect(self.decisions[number], history) for number in due]
        known = Records(
            history=history,
            sites=self.sites,
            missed=self.missed,
            decisions=tuple(self.decisions),
            refused=tuple(self.refused),
        )
        found = list(self.policy.decide(known))
        for one in found:
            self._check(one, known)
        for one in found:
            if one.action in _WITH_EFFECT and not one.release:
                self.waiting.append((self.seen + LATER, len(self.decisions)))
            self.decisions.append(one)
        return found, effects

    def refuse(self, refused: Refused) -> None:
        """Records that a site refused an action, and drops the pending effect of that decision."""
        self.refused.append(refused)
        same = (refused.step, refused.action, refused.site)
        self.waiting = [
            (at, number)
            for at, number in self.waiting
            if (self.decisions[number].step, self.decisions[number].action, self.decisions[number].site) != same
        ]

    def _check(self, one: Decision, known: Records) -> None:
        if not isinstance(one, Decision):
            raise InvalidTypeError(f"expected decisions from the policy, got {type(one).__name__}")
        site = next((site for site in self.sites if site.name == one.site), None)
        if one.step != known.step or (one.site is not None and site is None):
            raise InvalidValueError(
                f"expected a decision for step {known.step} and one of the sites, got step {one.step} and {one.site!r}"
            )
        if site is not None and site.unknown and one.action is not Action.NONE:
            raise InvalidValueError(
                f"cannot use {one.action} at {one.site}, whose weights are not confirmed: {site.unknown}"
            )
        if site is not None and one.heads and max(one.heads) >= site.n_heads:
            raise InvalidValueError(f"{one.site} has {site.n_heads} heads, but the policy names head {max(one.heads)}")
        if one.release and one.heads:
            active = active_actions(known.decisions, known.refused).get((one.remedy or str(one.action), one.site))
            if active is not None and not active[1]:
                raise InvalidValueError(
                    f"{one.action} is active on all heads of {one.site}, so it is released as a whole: expected no "
                    f"heads in the release, got {one.heads}"
                )

    def _effect(self, one: Decision, history: History) -> DecisionEffect:
        series = history.series("max_logit")
        assert series is not None
        rows = [i for i, site in enumerate(self.sites) if one.site in (None, site.name)]
        own = np.asarray(series, dtype=np.float64)[:, rows]
        own = own[:, :, list(one.heads)] if one.heads else own
        then = int(np.searchsorted(history.steps, one.step, side="right")) - 1  # the last record up to the decision
        tops = [float(np.fmax.reduce(own[k].ravel(), initial=np.nan)) for k in (max(then, 0), -1)]
        return DecisionEffect(
            step=int(history.steps[-1]),
            of_step=one.step,
            action=one.action,
            site=one.site,
            heads=one.heads,
            before=tops[0],
            after=tops[1],
            expected=one.expected,
        )


FIELDS = ("max_logit", "entropy")  # the per-head fields that a policy may read
MOST_PLANNED = 20_000  # schedules with more steps are not stored with the start event


def begun(spec: str, runner: PolicyRunner, planned: PlannedRates | None) -> Row:
    """The first event of an autopilot, which contains what a replay needs in addition to the records."""
    known = planned is not None and planned.steps <= MOST_PLANNED
    alone = [f"{s.name}: {s.unknown}" for s in runner.sites if s.unknown] + list(runner.missed)
    unverified = f". It does not act on unverified attention: {'; '.join(alone)}" if alone else ""
    return {
        "event": "autopilot",
        "policy": spec,
        "sites": [{"name": s.name, "n_heads": s.n_heads, "unknown": s.unknown} for s in runner.sites],
        "missed": list(runner.missed),
        "refusals": [{"action": r.action, "site": r.site, "reason": r.reason} for r in runner.refused],
        "clock": planned.clock.tolist() if planned is not None and known else None,
        "text": f"autopilot with the policy {spec}" + unverified,
    }


@accepts_earlier_calls("replay(run, policy)", renamed={"named": "policy"})
def replay(
    run: str | Path | History, policy: str | Policy = "ladder", *, planned: PlannedRates | None = None
) -> list[Decision | DecisionEffect]:
    """Returns the decisions of a policy on the records of a run, and the effects it would observe, in order.

    For a run that had an autopilot with the same policy, the result is that autopilot's own decisions; refusals are
    read from the run's events. For other runs, every site counts as verified unless the run says otherwise, and no
    action is refused.

    Args:
        run: the directory or the history of a watched or trained run.
        policy: the policy.
        planned: the learning rates of the whole run; by default, those recorded by an autopilot.

    Raises:
        RunDirectoryError: the run does not exist.
        InvalidValueError: the run has no logits per head.
        UnknownNameError: the policy is unknown.

    >>> history = History(steps=np.arange(9), values={}, heads={"max_logit": 99.0 * np.arange(9.0).reshape(9, 1, 1)})
    >>> [(found.step, found.action.value) for found in replay(history)][:2]
    [(0, 'watch_closer'), (1, 'qk_clip')]
    """
    chosen = known_policy(policy)
    if isinstance(run, History):
        return _replayed(run, PolicyRunner(chosen, _sites(run)), (), planned)
    place = RunDirectory(Path(run))
    place.config()  # raises an error if there is no run
    events = [event for event in place.events() if "step" in event]
    starts = [event for event in events if event.get("event") == "autopilot"]
    history = History.read(place)
    if not starts:
        return _replayed(history, PolicyRunner(chosen, _sites(history, place.config())), (), planned)
    start = starts[0]
    try:
        sites = [SiteFacts(**site) for site in start["sites"]]
        runner = PolicyRunner(chosen, sites, start["missed"])
        runner.refused += [Refused(step=-1, **one) for one in start["refusals"]]
        found = [event for event in events if event.get("event") == "refused"]
        refusals = [Refused(**{k: event[k] for k in ("step", "action", "site", "reason")}) for event in found]
        if planned is None and start["clock"] is not None:
            planned = PlannedRates(clock=np.array(start["clock"]))
    except (KeyError, TypeError) as error:
        raise DamagedFileError(f"{place.path / 'events.jsonl'} has no valid autopilot start ({error}).") from error
    return _replayed(history, runner, refusals, planned)


def _replayed(
    history: History, runner: PolicyRunner, refusals: Sequence[Refused], planned: PlannedRates | None
) -> list[Decision | DecisionEffect]:
    if "max_logit" not in history.heads:
        raise InvalidValueError(
            "expected a run that records the largest logit of each head, as qkeel.watch and qkeel run do"
        )
    recording = Recording([site.name for site in runner.sites], planned=planned or history.planned)
    out: list[Decision | DecisionEffect] = []
    for n in range(len(history)):
        values = {name: v[n] for name, v in history.values.items()} | {"step": history.steps[n]}
        if history.rates is not None:
            values["lr"] = history.rates[n]
        recording.append(values, {name: v[n] for name, v in history.heads.items() if name in FIELDS})
        decisions, effects = runner.see(recording.history)
        out += [*effects, *decisions]
        # In a live run, a refusal is known only after the decision, so a replay passes it on in the same order.
        for one in refusals:
            if one.step == int(history.steps[n]):
                runner.refuse(one)
    return out


def _sites(history: History, config: Row | None = None) -> list[SiteFacts]:
    """The sites of the layers in a history, with what the run's config says about their weights."""
    logits = history.heads.get("max_logit")
    if logits is None:
        return []
    names = history.layers or [f"layer {i}" for i in range(logits.shape[1])]
    said = {} if config is None else {s.get("name"): s for s in config.get("sites") or () if isinstance(s, dict)}
    found = []
    for i, name in enumerate(names):
        weights = str(said.get(name, {}).get("weights", "known"))
        n = int(np.isfinite(logits[:, i]).any(0).sum()) or logits.shape[2]
        found.append(SiteFacts(name=name, n_heads=n, unknown="" if weights == "known" else weights))
    return found


# Applying and removing remedies. No other code in this package changes the model.

RemedyKey = tuple[str, int]  # a remedy with its options, and the index of the optimizer that it acts on
SiteHeads = dict[str, tuple[int, ...]]  # heads by site, where () stands for all heads
BLEND = 5  # optimizer steps over which a new norm is blended in
Refusals = list[tuple[Action, str | None, str]]

_COMPILED = {
    Action.CLIP: "the model is compiled: to read its logits, qk_clip runs one more forward pass without gradients",
    Action.NORM: "the model is compiled: adding a norm makes it recompile",
}


@final
class RemedyManager:
    """Applies the requested remedies, with one handle per remedy and optimizer.

    To change the heads of a remedy, the manager removes its handle and applies the remedy again with the old state. If
    a site refuses, the previous remedies are restored, so that no remedy remains partially applied.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], sites: Sequence[AttentionSite], batch: object
    ) -> None:
        self.model, self.optimizers, self.batch = model, list(optimizers), batch
        self.handles: dict[RemedyKey, tuple[Handle, SiteHeads]] = {}
        self.norm: tuple[str, Retrofit] | None = None
        self.compiled = False  # whether the model was observed to run compiled code
        self._said: set[Action] = set()
        self.know(sites)

    def know(self, sites: Sequence[AttentionSite]) -> None:
        """Sets the sites. After a resume without remedies, the sites are found later, in the first measured pass."""
        self.sites = list(sites)
        self._home = {site.name: self._optimizer_of(site) for site in self.sites}

    def _optimizer_of(self, site: AttentionSite) -> int:
        """The index of the optimizer that contains the site's weights, or 0 if the site only knows copies of them."""
        names = {s.parameter for s in (*site.query, *site.key)}
        own = {id(p) for name, p in self.model.named_parameters() if name in names}
        held = ({id(p) for g in o.param_groups for p in g["params"]} for o in self.optimizers)
        return next((i for i, ids in enumerate(held) if ids & own), 0)

    def try_all(self) -> Refusals:
        """Returns what sites refuse, which is determined by applying each remedy and removing it again; the model stays
        bit-identical."""
        found: Refusals = []
        verified = [site for site in self.sites if site.verified]
        for action, spec in ((Action.CLIP, "qk_clip"), (Action.RATES, "lalr")):
            for i in range(len(self.optimizers)):
                own = [site.name for site in verified if self._home[site.name] == i]
                if own and self._refusal((spec, i), dict.fromkeys(own, ())):
                    refusals = {name: self._refusal((spec, i), {name: ()}) for name in own}
                    found += [(action, name, why) for name, why in refusals.items() if why]
        if self.batch is None:
            found.append((Action.NORM, None, "its gains are fitted on a batch: pass batch=batch to the autopilot"))
        return found

    def _refusal(self, key: RemedyKey, heads: SiteHeads) -> str:
        """Returns why these heads refuse a remedy, or "" if they accept it; the remedy is removed again."""
        try:
            self._applied(key, heads).remove()
        except QkeelError as error:
            return str(error)
        return ""

    def set(self, held: ActiveActions, optimizer: int) -> Refusals:
        """Applies exactly the remedies that should be active on this optimizer; returns what was refused."""
        norm = next((spec for (spec, _), (action, _) in held.items() if action is Action.NORM), "")
        if refused := self.set_norm(norm):
            return refused
        wanted: dict[RemedyKey, SiteHeads] = {}
        actions: dict[RemedyKey, Action] = {}
        for (spec, site), (action, heads) in held.items():
            if action in (Action.CLIP, Action.RATES) and site is not None and self._home[site] == optimizer:
                wanted.setdefault((spec, optimizer), {})[site] = heads
                actions[spec, optimizer] = action
        for key in [key for key in self.handles if key[1] == optimizer and key not in wanted]:
            self.handles.pop(key)[0].remove()
        for key, heads in wanted.items():
            if key not in self.handles or self.handles[key][1] != heads:
                self._say(actions[key])
                refused += [(actions[key], site, why) for site, why in self._exchange(key, heads)]
        return refused

    def _exchange(self, key: RemedyKey, wanted: SiteHeads) -> Iterator[tuple[str, str]]:
        """Changes the heads of a remedy; yields the sites that refuse and the reasons."""
        old, before = self.handles.pop(key, (None, {}))
        state = {} if old is None else old.state()
        if old is not None:
            old.remove()
        try:
            self.put_on(key, wanted, state, more=True)
            return
        except QkeelError:  # at least one site refuses: try the sites one by one
            kept = {site: heads for site, heads in before.items() if site in wanted}
        for site, heads in wanted.items():
            if why := self._refusal(key, {**kept, site: heads}):
                yield site, why
            else:
                kept[site] = heads
        if kept:
            self.put_on(key, kept, state, more=True)

    def put_on(self, key: RemedyKey, heads: SiteHeads, state: State, *, more: bool = False) -> None:
        """Applies a remedy to these heads and restores its `state`; with `more`, some of the heads have no state yet.

        Raises:
            QkeelError: a site refuses, or the state lacks a head; in that case, nothing is changed.
        """
        handle = self._applied(key, heads)
        try:
            handle.load({**handle.state(), **state} if more else state)
        except QkeelError:
            handle.remove()
            raise
        self.handles[key] = handle, dict(heads)

    def _parsed(self, key: RemedyKey) -> QKClip | LALR:
        (asked,) = parse(key[0])
        if not isinstance(asked, (QKClip, LALR)):
            raise RefusedError(f"expected qk_clip or lalr, which have the option heads, got {key[0]!r} from the policy")
        return asked

    def _applied(self, key: RemedyKey, heads: SiteHeads) -> Handle:
        remedy = dataclasses.replace(self._parsed(key), heads=tuple(heads.items()))
        return apply(self.model, remedy, self.optimizers[key[1]], sites=self.sites, partial=True)

    def set_norm(self, spec: str) -> Refusals:
        """Replaces all remedies by a norm with fitted gains throughout the model, once; "" stands for no norm.

        The gains are added to the first optimizer that accepts them. The norm is blended in gradually as that optimizer
        steps, so that the loss does not jump.
        """
        if not spec or self.norm is not None:
            return []
        self._say(Action.NORM)
        before = [(key, heads, handle.state()) for key, (handle, heads) in self.handles.items()]
        self.remove()
        reason = ""
        try:
            for optimizer in self.optimizers:
                try:
                    norm = retrofit(
                        self.model, spec, [self.batch], optimizer=optimizer, config=RetrofitConfig(anneal=BLEND)
                    )
                    self.norm = spec, norm
                    return []
                except QkeelError as error:
                    reason = reason or str(error)
        finally:
            for one in before if self.norm is None else ():
                self.put_on(*one)
        return [(Action.NORM, None, reason)]

    def _say(self, action: Action) -> None:
        if self.compiled and action in _COMPILED and action not in self._said:
            self._said.add(action)
            caution(_COMPILED[action])

    def remove(self, *, norm: bool = True) -> None:
        """Removes everything, the latest change first; norm=False keeps a norm, which is part of the trained model."""
        for key in reversed(list(self.handles)):
            self.handles.pop(key)[0].remove()
        if norm and self.norm is not None:
            self.norm[1].remove()
            self.norm = None

    def state(self) -> State:
        """Returns the state of the active remedies, numbered in the order of `handles`, and of the norm."""
        parts = {str(i): handle for i, (handle, _) in enumerate(self.handles.values())}
        parts |= {} if self.norm is None else {"norm": self.norm[1]}
        return {f"{i}.{name}": value for i, handle in parts.items() for name, value in handle.state().items()}
