"""An autopilot as tensors by name, which any checkpoint can hold, and back. Nothing is pickled."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np
import torch

from qkeel.autopilot.policy import Decision, Refused, SiteFacts
from qkeel.errors import InvalidValueError, QkeelError, RefusedError
from qkeel.handle import State, under
from qkeel.metrics import Row
from qkeel.monitor.record.sample import Sample

if TYPE_CHECKING:
    from qkeel.autopilot.autopilot import Autopilot


def state(pilot: Autopilot) -> State:
    """The state of an autopilot: its records, its decisions, and what the remedies in force remember."""
    found: State = {f"monitor/{name}": value for name, value in pilot.monitor.state().items()}
    about: Row = {"policy": pilot.named, "begun": pilot.deliberation is not None}
    if (coming := pilot.next_sample(lag=0)) is not None:
        found |= {f"coming/{name}": torch.from_numpy(x.copy()) for name, x in coming.heads.items()}
        about["coming"] = {"step": coming.step, "values": dict(coming.values), "layers": coming.layers}
    if pilot.deliberation is not None and pilot.actuator is not None:
        known, actuator = pilot.deliberation, pilot.actuator
        found |= {f"records/{name}": torch.from_numpy(x.copy()) for name, x in pilot.recording.state().items()}
        found |= {f"remedy/{name}": value for name, value in actuator.state().items()}
        about = {
            **about,
            "sites": [dataclasses.asdict(site) for site in known.sites],
            "missed": known.missed,
            "decisions": [one.row() for one in known.decisions],
            "refused": [dataclasses.asdict(one) for one in known.refused],
            "seen": known.seen,
            "waiting": known.waiting,
            "handles": [(key, heads) for key, (_, heads) in actuator.handles.items()],
            "norm": "" if actuator.norm is None else actuator.norm[0],
            "closer": pilot.monitor.closer,
            "events": pilot.events,
        }
    text = json.dumps(about, default=list).encode()
    return {**found, "about": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def load(pilot: Autopilot, state: State) -> None:
    """Takes such a state up, before the first step.

    Raises: InvalidValueError if it is none or of another policy, or the training has begun; RefusedError if remedies
    were in force and the sites are not known.
    """
    if pilot.deliberation is not None:
        raise InvalidValueError(
            "expected the state of an autopilot before its first step; load it right after making it"
        )
    try:
        about = json.loads(bytes(state["about"].cpu().numpy()).decode())
        named, begun = about["policy"], about["begun"]
    except (KeyError, ValueError, AttributeError) as error:
        raise InvalidValueError(
            f"expected what state_dict() of an autopilot returned, got {list(state)[:5]}"
        ) from error
    if named != pilot.named:
        raise InvalidValueError(f"expected the state of the policy {pilot.named}, got that of {named}")
    if begun:
        _take_up(pilot, about, state)
    pilot.monitor.load(under("monitor/", state))


def _take_up(pilot: Autopilot, about: Row, state: State) -> None:
    sites = pilot.known_sites() if about["handles"] or about["norm"] else []
    known = pilot.start([SiteFacts(**one) for one in about["sites"]], about["missed"], sites)
    known.decisions = [Decision.of(one) for one in about["decisions"]]
    known.refused = [Refused(**one) for one in about["refused"]]
    known.seen, known.waiting = about["seen"], [(at, number) for at, number in about["waiting"]]
    if (coming := about.get("coming")) is not None:
        heads = {name: np.asarray(x) for name, x in under("coming/", state).items()}
        pilot.carried = Sample(**coming | {"layers": tuple(coming["layers"])}, heads=heads)
    pilot.recording.load({name: np.asarray(x) for name, x in under("records/", state).items()})
    pilot.events = list(about["events"])
    pilot.monitor.closer = about["closer"]
    actuator = pilot.actuator
    assert actuator is not None
    try:
        for _, _, why in actuator.set_norm(about["norm"]):
            raise RefusedError(f"the norm that was in force cannot be put back: {why}")
        if actuator.norm is not None:
            actuator.norm[1].load(under("remedy/norm.", state))
        for i, ((spec, number), heads) in enumerate(about["handles"]):
            own = under(f"remedy/{i}.", state)
            actuator.put_on((spec, number), {site: tuple(those) for site, those in heads.items()}, own)
    except QkeelError:
        actuator.remove()
        raise
