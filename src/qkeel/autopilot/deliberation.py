"""The decisions of a policy record by record, and the effects that were seen: the same live and in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from qkeel.autopilot.known_policies import policy
from qkeel.autopilot.policy import Action, Decision, Effect, Policy, Records, Refused, SiteFacts
from qkeel.errors import DamagedFileError, InvalidTypeError, InvalidValueError
from qkeel.metrics import Row
from qkeel.monitor.alarms.forecast import PlannedRates
from qkeel.monitor.alarms.history import History
from qkeel.monitor.alarms.recording import Recording
from qkeel.records import RunDirectory

LATER = 5  # records after a decision at which its effect is looked at
_WITH_EFFECT = (Action.CLIP, Action.RATES, Action.NORM)


@final
class Deliberation:
    """Asks a policy at each record. What it keeps follows from the records and the refusals alone.

    Of sites whose weights are not confirmed, and of attention that was missed, the policy may know nothing but that.
    """

    def __init__(self, policy: Policy, sites: Sequence[SiteFacts], missed: Sequence[str] = ()) -> None:
        self.policy, self.sites, self.missed = policy, tuple(sites), tuple(missed)
        self.decisions: list[Decision] = []
        self.refused: list[Refused] = []
        self.seen = 0  # records
        # Numbers of the record at which, and of the decision whose effect is due.
        self.waiting: list[tuple[int, int]] = []

    def see(self, history: History) -> tuple[list[Decision], list[Effect]]:
        """The decisions of the last record, and the effects that are seen in it.

        Raises: InvalidValueError, InvalidTypeError if the policy returns what is no decision for these sites and step.
        """
        self.seen += 1
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
        """A site has refused an action; of a decision that came to nothing no effect is awaited."""
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
            raise InvalidValueError(f"{one.action} at {one.site}, whose weights are not confirmed: {site.unknown}")
        if site is not None and one.heads and max(one.heads) >= site.n_heads:
            raise InvalidValueError(f"{one.site} has {site.n_heads} heads, and the policy names {max(one.heads)}")

    def _effect(self, one: Decision, history: History) -> Effect:
        series = history.series("max_logit")
        assert series is not None
        rows = [i for i, site in enumerate(self.sites) if one.site in (None, site.name)]
        own = np.asarray(series, dtype=np.float64)[:, rows]
        own = own[:, :, list(one.heads)] if one.heads else own
        then = int(np.searchsorted(history.steps, one.step, side="right")) - 1
        tops = [float(np.fmax.reduce(own[k].ravel(), initial=np.nan)) for k in (max(then, 0), -1)]
        return Effect(
            step=int(history.steps[-1]),
            of_step=one.step,
            action=one.action,
            site=one.site,
            heads=one.heads,
            before=tops[0],
            after=tops[1],
            expected=one.expected,
        )


FIELDS = ("max_logit", "entropy")  # of heads: what a policy may read, besides the numbers of the whole model
MOST_PLANNED = 20_000  # steps of a schedule that is written down with the start


def begun(named: str, deliberation: Deliberation, planned: PlannedRates | None) -> Row:
    """The event that an autopilot begins with: what a replay has to know besides the records."""
    known = planned is not None and planned.steps <= MOST_PLANNED
    return {
        "event": "autopilot",
        "policy": named,
        "sites": [{"name": s.name, "n_heads": s.n_heads, "unknown": s.unknown} for s in deliberation.sites],
        "missed": list(deliberation.missed),
        "refusals": [{"action": r.action, "site": r.site, "reason": r.reason} for r in deliberation.refused],
        "clock": planned.clock.tolist() if planned is not None and known else None,
        "text": _introduced(named, deliberation),
    }


def _introduced(named: str, deliberation: Deliberation) -> str:
    alone = [f"{s.name}: {s.unknown}" for s in deliberation.sites if s.unknown] + list(deliberation.missed)
    if not alone:
        return f"autopilot with the policy {named}"
    return f"autopilot with the policy {named}. It leaves alone what was not verified: {'; '.join(alone)}"


def replay(
    run: str | Path | History, named: str | Policy = "ladder", *, planned: PlannedRates | None = None
) -> list[Decision | Effect]:
    """Returns what a policy decides on the records of a run, and the effects it would see, in order.

    On a run that had an autopilot with the same policy these are its own decisions: what sites refused is read from the
    run's events. Elsewhere all sites are taken for verified unless the run says otherwise, and no action is refused.

    Args:
        run: the directory of a watched or trained run, or the history of one.
        named: the policy.
        planned: the learning rates of the whole run; by default those that an autopilot has written down.

    Raises: RunDirectoryError if there is no such run, InvalidValueError if it has no logits of heads, UnknownNameError
        for a policy that is not known.

    >>> history = History(steps=np.arange(9), values={}, heads={"max_logit": 99.0 * np.arange(9.0).reshape(9, 1, 1)})
    >>> [(found.step, found.action.value) for found in replay(history)][:3]
    [(0, 'watch_closer'), (6, 'qk_clip')]
    """
    chosen = policy(named)
    if isinstance(run, History):
        return _replayed(run, Deliberation(chosen, _sites(run)), (), planned)
    place = RunDirectory(Path(run))
    place.config()  # raises where there is no run
    events = [event for event in place.events() if "step" in event]
    starts = [event for event in events if event.get("event") == "autopilot"]
    history = History.read(place)
    if not starts:
        return _replayed(history, Deliberation(chosen, _sites(history, place.config())), (), planned)
    start = starts[0]
    try:
        sites = [SiteFacts(**site) for site in start["sites"]]
        deliberation = Deliberation(chosen, sites, start["missed"])
        deliberation.refused += [Refused(step=-1, **one) for one in start["refusals"]]
        found = [event for event in events if event.get("event") == "refused"]
        refusals = [Refused(**{k: event[k] for k in ("step", "action", "site", "reason")}) for event in found]
        if planned is None and start["clock"] is not None:
            planned = PlannedRates(clock=np.array(start["clock"]))
    except (KeyError, TypeError) as error:
        raise DamagedFileError(f"{place.path / 'events.jsonl'} holds no start of an autopilot ({error}).") from error
    return _replayed(history, deliberation, refusals, planned)


def _replayed(
    history: History, deliberation: Deliberation, refusals: Sequence[Refused], planned: PlannedRates | None
) -> list[Decision | Effect]:
    if "max_logit" not in history.heads:
        raise InvalidValueError(
            "expected a run with the largest logit of each head on record, as qkeel.watch and qkeel run write it"
        )
    recording = Recording([site.name for site in deliberation.sites], planned=planned or history.planned)
    out: list[Decision | Effect] = []
    for n in range(len(history)):
        values = {name: v[n] for name, v in history.values.items()} | {"step": history.steps[n]}
        if history.rates is not None:
            values["lr"] = history.rates[n]
        recording.append(values, {name: v[n] for name, v in history.heads.items() if name in FIELDS})
        decisions, effects = deliberation.see(recording.history)
        out += [*effects, *decisions]
        for one in refusals:
            if one.step == int(history.steps[n]):
                deliberation.refuse(one)
    return out


def _sites(history: History, config: Row | None = None) -> list[SiteFacts]:
    """The layers of a history, with what the run says of their weights."""
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
