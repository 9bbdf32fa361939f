"""The autopilot of a training run: where it begins, what it does after each step, what it keeps in a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.autopilot.actuator import FIELDS, PolicyRunner, RemedyManager, begun
from qkeel.autopilot.policy import Action, Decision, Policy, Refused, SiteFacts, in_force
from qkeel.autopilot.policy import policy as known_policy
from qkeel.capture.example import arguments
from qkeel.errors import AlarmWarning, InvalidTypeError, InvalidValueError, QkeelError, RefusedError, caution
from qkeel.handle import Handle, State, under
from qkeel.heads.site import AttentionSite
from qkeel.metrics import Row
from qkeel.monitor import Cadence, PlannedRates, Sink
from qkeel.monitor.alarms import Recording
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.record import Sample
from qkeel.monitor.token_classes import MaskSource
from qkeel.monitor.watch import watch
from qkeel.options import parse
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import FaultGuard
from qkeel.patching.optimizers import StepHooks, stepping, when_hooks_are_done
from qkeel.remedies.head_weights import innermost
from qkeel.sites.find import find_sites

# An autopilot as tensors by name, which any checkpoint can hold, and back. Nothing is pickled.


def state(pilot: Autopilot) -> State:
    """The state of an autopilot: its records, its decisions, and what the active remedies remember."""
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
    were active and the sites are not known.
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
            raise RefusedError(f"the norm that was active cannot be restored: {why}")
        if actuator.norm is not None:
            actuator.norm[1].load(under("remedy/norm.", state))
        for i, ((spec, number), heads) in enumerate(about["handles"]):
            own = under(f"remedy/{i}.", state)
            actuator.put_on((spec, number), {site: tuple(those) for site, those in heads.items()}, own)
    except QkeelError:
        actuator.remove()
        raise


# The Autopilot: asks the policy after each measured step, and sees to what it decides.

_OFF = (
    "the autopilot failed and changes nothing further: {}. What it has applied stays active until remove(); training "
    "continues"
)


@final
class Autopilot(Handle):
    """Watches a training run and does what its policy decides; made by `qkeel.autopilot`.

    `remove()` undoes everything and stops watching. `close()` stops watching and removes what acts on steps, but
    leaves a norm in the model, which was trained with it. `events` are what it did, as in the journal of the run.
    `state_dict()` and `load_state_dict()` carry it over a checkpoint: give what they return to the checkpoint's file
    and load it before the first step.

    What is measured in step s is decided on when step s + 1 is done: by then it has come from the device and from the
    other processes, so that none waits, and the lag is the same in each. Nothing is changed in the middle of a step:
    decisions take effect when the hooks of step s + 1 are through. Before the first the training is bit for bit that of
    a watched run.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[Optimizer], policy: Policy, named: str, example: object):
        self.monitor, self.policy, self.named = monitor, policy, named
        self.optimizers, self.example = list(optimizers), example
        self.events: list[Row] = []
        self.warns = True  # with a warning for each decision, as for alarms
        self.recording = Recording(planned=monitor.history.planned)
        self.deliberation: PolicyRunner | None = None
        self.actuator: RemedyManager | None = None
        self.carried: Sample | None = None  # measured before a checkpoint, and not decided on in it
        self._pending = [False] * len(self.optimizers)
        self._later = [Handle(lambda: None) for _ in self.optimizers]
        self._guard = FaultGuard(_OFF, self._stop)
        self._stopped = False
        hooks = [
            StepHooks(lambda _: None, lambda o: self._guard(self._after, o), optimizer) for optimizer in self.optimizers
        ]
        self._hooks = hooks
        super().__init__(self._take_off, state=lambda: state(self), load=lambda s: load(self, s))

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of the policy so far."""
        return [] if self.deliberation is None else list(self.deliberation.decisions)

    @property
    def asked_rate(self) -> bool:
        """Returns whether a lower learning rate was asked for, which only the training script can give."""
        return any(one.action is Action.RATE for one in self.decisions)

    def state_dict(self) -> State:
        """Returns tensors by name, for a checkpoint."""
        return self.state()

    def load_state_dict(self, state: State) -> None:
        """Continues where `state_dict()` was taken; to be called before the first step. Where a norm was active it is
        added again, with gains for the model's own state dict to overwrite: load that, and the optimizer's, after it.

        Raises: InvalidValueError if it is no such state, or of another policy; RefusedError if remedies were active
        and the sites are not known: then the autopilot needs an example.
        """
        self.load(state)

    def close(self, *, complete: bool = True) -> None:
        """Stops watching, as `Monitor.close` does; `complete` says whether training ended as planned."""
        if complete:
            self.monitor.training_over()  # while what it has put on is active
        self._end()
        if self.actuator is not None:
            self.actuator.remove(norm=False)
        self.monitor.close(complete=complete)

    def __exit__(self, *exc: object) -> None:
        self.close(complete=exc[0] is None)
        self.remove()

    def _take_off(self) -> None:
        self._end()
        if self.actuator is not None:
            self.actuator.remove()
        self.monitor.remove()

    def _end(self) -> None:
        """Sees the record of the last step, which no step has followed, and stops."""
        last = None if self._stopped or self.deliberation is None else self.next_sample(lag=0)
        if last is not None:
            self._guard(self._see, last)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        # Again at remove(): in a step they stay, idle.
        for hook in [*self._hooks, *([] if stepping() else self._later)]:
            hook.remove()

    def known_sites(self) -> list[AttentionSite]:
        """The sites, as far as they are known without a pass of the training.

        Raises: RefusedError if they are not.
        """
        if self.monitor.sites:
            return list(self.monitor.sites)
        args, kwargs = ((), {}) if self.example is None else arguments(self.example)
        try:
            return list(find_sites(self.monitor.model, *args, **kwargs))
        except RefusedError as error:
            raise RefusedError(
                "expected an example, to restore what was active before the first step: give the autopilot or the "
                "callback example=batch, with a batch as the model takes it"
            ) from error

    def start(self, facts: Sequence[SiteFacts], missed: Sequence[str], sites: Sequence[AttentionSite]) -> PolicyRunner:
        """Takes up these sites."""
        self.actuator = RemedyManager(self.monitor.model, self.optimizers, sites, self.example)
        self.recording.layers = tuple(site.name for site in facts)
        self.deliberation = PolicyRunner(self.policy, facts, missed)
        return self.deliberation

    def _after(self, optimizer: Optimizer) -> None:
        """Among the hooks after a step."""
        number = next(i for i, own in enumerate(self.optimizers) if own is optimizer)
        self._later[number].remove()
        if self._stopped or not self.monitor.active:
            return
        # The sites are taken up at once, which waits for the first record alone: a checkpoint may follow.
        sample = self.next_sample(lag=0 if self.deliberation is None else 1) if number == 0 else None
        if self._pending[number] or sample is not None:
            act = lambda _: self._guard(self._act, number, sample)  # noqa: E731
            self._later[number] = when_hooks_are_done(optimizer, act)

    def next_sample(self, *, lag: int) -> Sample | None:
        """The record that is to be decided on, of a step at least `lag` before the one done last; None without one."""
        sample = self.monitor.sample_before(self.monitor.steps - lag) or self.carried
        steps = self.recording.history.steps
        return sample if sample is not None and (not len(steps) or sample.step > steps[-1]) else None

    def _act(self, number: int, sample: Sample | None) -> None:
        """Sees to the record and to what was decided; called when the hooks are through."""
        if self.deliberation is None:
            assert sample is not None  # or there was nothing to act on
            self._begin(sample)
        elif sample is not None:
            self._see(sample)
        known, actuator = self.deliberation, self.actuator
        if not self._pending[number] or known is None or actuator is None:
            return
        self._pending[number] = False
        actuator.compiled = self.monitor.compiled
        for action, site, reason in actuator.set(in_force(known.decisions, known.refused), number):
            refused = Refused(step=known.decisions[-1].step, action=str(action), site=site, reason=reason)
            known.refuse(refused)
            self._pending[number] |= action is Action.NORM  # what was decided with it follows after the next step
            self._note({"event": "refused", **dataclasses.asdict(refused), "text": f"refused {action}: {reason}"})

    def _see(self, sample: Sample) -> None:
        known = self.deliberation
        assert known is not None
        if self.actuator is not None and not self.actuator.sites:
            self.actuator.know(self.monitor.sites)
        heads = {name: values for name, values in sample.heads.items() if name in FIELDS}
        self.recording.append({**sample.values, "step": sample.step}, heads)
        decisions, effects = known.see(self.recording.history)
        for one in (*effects, *decisions):
            self._note(one.row())
        for one in decisions:
            if self.warns and dist.rank() == 0:
                caution(str(one), AlarmWarning)
        if decisions:
            self._pending = [True] * len(self.optimizers)
            held = in_force(known.decisions, known.refused)
            closer = [parse(spec)[0].options for (spec, _), (action, _) in held.items() if action is Action.WATCH]
            self.monitor.closer = int(closer[0]["every"]) if closer else None

    def _begin(self, sample: Sample) -> None:
        """Takes up the sites that the first record shows, and what they refuse."""
        sites = {site.name: site for site in self.monitor.sites}
        facts = []
        for name in sample.layers:
            site = sites.get(name)
            unknown = "it was not found among the sites of this process" if site is None else ""
            if site is not None and not site.verified:
                unknown = site.unverified or site.why or "its weights are not known"
            n = sample.heads["max_logit"].shape[1] if site is None else site.n_heads
            facts.append(SiteFacts(name=name, n_heads=n, unknown=unknown))
        missed = [str(one) for one in self.monitor.missed]
        dist.done_by_all("qkeel.autopilot", lambda: (facts, missed), repr, lambda _: None, patience=dist.PATIENCE)
        known = self.start(facts, missed, list(sites.values()))
        assert self.actuator is not None
        for action, site, reason in self.actuator.try_all():
            known.refuse(Refused(step=-1, action=str(action), site=site, reason=reason))
        start = begun(self.named, known, self.recording.planned)
        if dist.rank() == 0 and (missed or any(site.unknown for site in facts)):
            caution(str(start["text"]))
        self._note({**start, "step": sample.step})

    def _note(self, row: Row) -> None:
        self.events.append(row)
        self.monitor.event(row)


# `qkeel.autopilot`: the checked way to an Autopilot.

EVERY = 10  # steps


def autopilot(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy = "ladder",
    planned: PlannedRates | None = None,
    sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
    every: int | Cadence = EVERY,
    query_mask: MaskSource | None = None,
    example: object = None,
) -> Autopilot:
    """Watch a training run, and hold the logits of the heads that need it by the cheapest remedy that does.

    Until its first action the training is bit for bit what it is without it. Every process of a run calls it.

    >>> import torch
    >>> from qkeel.nn import Attention
    >>> model = Attention(d_model=8, n_heads=2)
    >>> with autopilot(model, torch.optim.AdamW(model.parameters())) as pilot:
    ...     pilot.decisions
    []

    Args:
        model: as for `qkeel.watch`.
        optimizer: what steps it; of several the first counts the steps.
        policy: what is done when: "ladder" with its options ("ladder:threshold=50,allow_new_parameters=true"), or a
            Policy of your own.
        planned: the learning rates of the run, if known: with them it acts earlier.
        sinks: where records and events go; see `qkeel.watch`.
        every: at which steps the run is measured before anything is wrong.
        query_mask: which query rows count; see `qkeel.watch`.
        example: a batch as the model takes it: for a calibrated norm, and to resume with active remedies.

    Returns: the Autopilot: `events`, `decisions`, `state_dict()`, `load_state_dict()`, `close()`; a context manager,
    and `remove()` undoes all.

    Raises:
        InvalidTypeError: there is no optimizer, or something else in its place.
        UnknownNameError: no such policy or option. Besides the errors of `qkeel.watch` and of `find_sites`.
    """
    optimizers = _several(optimizer)
    chosen = known_policy(policy)
    sites = None
    if example is not None:
        args, kwargs = arguments(example)
        sites = find_sites(unwrapped(model), *args, **kwargs) if isinstance(model, nn.Module) else None
    monitor = watch(model, optimizers[0], every=every, sinks=sinks, query_mask=query_mask, planned=planned, sites=sites)
    return attach(monitor, optimizers, policy=policy if isinstance(policy, str) else chosen, example=example)


def attach(
    monitor: Monitor,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy = "ladder",
    example: object = None,
) -> Autopilot:
    """An autopilot on a model that is watched already, before its first step; it closes the monitor.

    >>> import torch
    >>> from qkeel.nn import Attention
    >>> model = Attention(d_model=8, n_heads=2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> attach(watch(model, optimizer), optimizer).remove()

    Args:
        monitor: made with this optimizer, the first of several.
        optimizer: what steps the model.
        policy: see `autopilot`.
        example: see `autopilot`.

    Raises: see `autopilot`; InvalidValueError if the monitor has seen training already.
    """
    optimizers = _several(optimizer)
    chosen = known_policy(policy)
    if not isinstance(monitor, Monitor):
        raise InvalidTypeError(f"expected the Monitor that qkeel.watch returns, got {type(monitor).__name__}")
    if monitor.history.phase == "train" and len(monitor.history):
        raise InvalidValueError(
            "expected a monitor that has recorded nothing yet; attach the autopilot before training"
        )
    return Autopilot(monitor, optimizers, chosen, policy if isinstance(policy, str) else repr(chosen), example)


def _several(given: object) -> list[Optimizer]:
    several = list(given) if isinstance(given, Sequence) else [given]
    found = [innermost(one) for one in several if isinstance(one, Optimizer)]
    for one in several:
        if not isinstance(one, Optimizer):
            raise InvalidTypeError(
                f"expected the optimizer that steps the model, got {type(one).__name__}; the remedies of an autopilot "
                "act on its steps: qkeel.autopilot(model, optimizer)"
            )
    if not several:
        raise InvalidTypeError("expected at least one optimizer, got an empty list")
    return found
