"""A recorded run, replayed through a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qkeel.autopilot.decision import Decision, Effect, Refused, SiteFacts
from qkeel.autopilot.deliberation import Deliberation
from qkeel.autopilot.known_policies import policy
from qkeel.autopilot.policy import Policy
from qkeel.errors import DamagedFileError, InvalidValueError
from qkeel.metrics import Row
from qkeel.monitor.alarms.forecast import PlannedRates
from qkeel.monitor.alarms.history import History
from qkeel.monitor.alarms.recording import Recording
from qkeel.records import RunDirectory

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
