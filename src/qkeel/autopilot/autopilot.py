"""The autopilot of a training run: how it is created, what it does after each step, and checkpoints."""

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
from qkeel.autopilot.policy import Action, Decision, Policy, Refused, SiteFacts, active_actions
from qkeel.autopilot.policy import policy as known_policy
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import AlarmWarning, InvalidTypeError, InvalidValueError, QkeelError, RefusedError, caution
from qkeel.handle import Handle, State, under
from qkeel.heads.site import AttentionSite
from qkeel.metrics import Row
from qkeel.monitor import Cadence, PlannedRates, Sink
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.record import Sample
from qkeel.monitor.recording import Recording
from qkeel.monitor.token_classes import MaskSource
from qkeel.monitor.watch import watch
from qkeel.options import parse
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import FaultGuard
from qkeel.patching.optimizers import StepHooks, stepping, when_hooks_are_done
from qkeel.remedies.head_weights import innermost
from qkeel.sites.find import find_sites

_NEEDS_SITES = (Action.CLIP, Action.RATES, Action.NORM)

# The state dict contains tensors by name, which every checkpoint format can store. Nothing is pickled.


def state(pilot: Autopilot) -> State:
    """The state of an autopilot: its records, its decisions, and the state of the active remedies."""
    found: State = {f"monitor/{name}": value for name, value in pilot.monitor.state().items()}
    about: Row = {"policy": pilot.spec, "begun": pilot.runner is not None}
    if (coming := pilot.next_sample(lag=0)) is not None:
        found |= {f"coming/{name}": torch.from_numpy(x.copy()) for name, x in coming.heads.items()}
        about["coming"] = {"step": coming.step, "values": dict(coming.values), "layers": coming.layers}
    if pilot.runner is not None and pilot.actuator is not None:
        known, actuator = pilot.runner, pilot.actuator
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
            "carried_out": pilot.carried_out,
            "events": pilot.events,
        }
    text = json.dumps(about, default=list).encode()
    return {**found, "about": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def load(pilot: Autopilot, state: State) -> None:
    """Restores a saved state, before the first step.

    Raises:
        InvalidValueError: the state is not that of an autopilot with this policy, or training has already begun.
        RefusedError: remedies were active and the sites are not known.
    """
    if pilot.runner is not None:
        raise InvalidValueError("training has already begun; load the state of an autopilot right after creating it")
    try:
        about = json.loads(bytes(state["about"].cpu().numpy()).decode())
        named, begun = about["policy"], about["begun"]
    except (KeyError, ValueError, AttributeError) as error:
        raise InvalidValueError(f"expected the result of an autopilot's state_dict(), got {list(state)[:5]}") from error
    if named != pilot.spec:
        raise InvalidValueError(f"expected the state of the policy {pilot.spec}, got the state of {named}")
    if begun:
        _take_up(pilot, about, state)
    pilot.monitor.load(under("monitor/", state))


def _take_up(pilot: Autopilot, about: Row, state: State) -> None:
    decisions, refused = [Decision.of(one) for one in about["decisions"]], [Refused(**one) for one in about["refused"]]
    # States of earlier versions lack it.
    carried_out = about.get("carried_out", [len(decisions)] * len(pilot.optimizers))
    if len(carried_out) != len(pilot.optimizers):
        raise InvalidValueError(
            f"expected the state of an autopilot of {len(pilot.optimizers)} optimizers, got one of {len(carried_out)}"
        )
    acting = any(action in _NEEDS_SITES for action, _ in active_actions(decisions, refused).values())
    sites = pilot.known_sites() if acting or about["handles"] or about["norm"] else []
    known = pilot.start([SiteFacts(**one) for one in about["sites"]], about["missed"], sites)
    known.decisions, known.refused = decisions, refused
    known.seen, known.waiting = about["seen"], [(at, number) for at, number in about["waiting"]]
    if (coming := about.get("coming")) is not None:
        heads = {name: np.asarray(x) for name, x in under("coming/", state).items()}
        pilot.carried = Sample(**coming | {"layers": tuple(coming["layers"])}, heads=heads)
    pilot.recording.load({name: np.asarray(x) for name, x in under("records/", state).items()})
    pilot.events, pilot.carried_out = list(about["events"]), list(carried_out)
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


# The Autopilot calls the policy after each measured step and carries out its decisions.

_OFF = (
    "the autopilot failed and changes nothing further: {}. Remedies that it has applied stay active until remove(); "
    "training continues"
)


@final
class Autopilot(Handle):
    """Watches a training run and carries out the decisions of its policy; created by `qkeel.autopilot`.

    `remove()` undoes everything and stops watching. `close()` stops watching and removes remedies for optimizer steps,
    but keeps a norm, because the model was trained with it. `events` lists every action of the autopilot, as the run's
    event log does. To checkpoint the autopilot, save its `state_dict()`, and after loading the checkpoint pass it to
    `load_state_dict()` before the next step.

    The policy bases its decisions on the measurements of step s and makes them when step s + 1 is complete. By then,
    the measurements have arrived from the device and from all processes, so that no waiting is needed and every process
    has the same lag. Decisions take effect after all hooks of step s + 1 have run, never within a step. Until the first
    action, training is bit-identical to that of a watched run.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[Optimizer], policy: Policy, spec: str, batch: object):
        self.monitor, self.policy, self.spec = monitor, policy, spec
        self.optimizers, self.batch = list(optimizers), batch
        self.events: list[Row] = []
        self.warns = True  # whether each decision raises a warning, as alarms do
        self.recording = Recording(planned=monitor.history.planned)
        self.runner: PolicyRunner | None = None
        self.actuator: RemedyManager | None = None
        self.carried: Sample | None = None  # measured before a checkpoint; the decision is made after it
        # By optimizer: the number of decisions that it has carried out. The others wait for its next step.
        self.carried_out = [0] * len(self.optimizers)
        self._later = [Handle(lambda: None) for _ in self.optimizers]
        self._guard = FaultGuard(_OFF, self._stop)
        self._stopped = False
        self._hooks = [self._follow(optimizer) for optimizer in self.optimizers]  # kept so that _stop() can remove them
        super().__init__(self._take_off, state=lambda: state(self), load=lambda s: load(self, s))

    def _follow(self, optimizer: Optimizer) -> StepHooks:
        return StepHooks(None, lambda o: self._guard(self._after, o), optimizer)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model, before the first record.

        Raises:
            InvalidValueError: the policy has already started.
        """
        found = innermost(optimizer)
        if any(own is found for own in self.optimizers):
            return
        if self.runner is not None:
            raise InvalidValueError("the policy has already started; pass all optimizers to the autopilot at once")
        self.optimizers.append(found)
        self.carried_out.append(0)
        self._later.append(Handle(lambda: None))
        self._hooks.append(self._follow(found))

    @property
    def decisions(self) -> list[Decision]:
        """The decisions that the policy has made so far."""
        return [] if self.runner is None else list(self.runner.decisions)

    @property
    def asked_rate(self) -> bool:
        """Whether the policy has requested a lower learning rate, which only the training script can set."""
        return any(one.action is Action.RATE for one in self.decisions)

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
        """Handles the record of the last step, for which no further step follows, and stops."""
        last = None if self._stopped or self.runner is None else self.next_sample(lag=0)
        if last is not None:
            self._guard(self._see, last)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        # Hooks cannot be removed within a step; they remain, without effect, until remove() is called again.
        for hook in [*self._hooks, *([] if stepping() else self._later)]:
            hook.remove()

    def known_sites(self) -> list[AttentionSite]:
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

    def start(self, facts: Sequence[SiteFacts], missed: Sequence[str], sites: Sequence[AttentionSite]) -> PolicyRunner:
        """Starts the policy on these sites."""
        self.actuator = RemedyManager(self.monitor.model, self.optimizers, sites, self.batch)
        self.recording.layers = tuple(site.name for site in facts)
        self.runner = PolicyRunner(self.policy, facts, missed)
        return self.runner

    def _after(self, optimizer: Optimizer) -> None:
        """Called by a hook after an optimizer step."""
        number = next(i for i, own in enumerate(self.optimizers) if own is optimizer)
        self._later[number].remove()
        if self._stopped or not self.monitor.active:
            return
        # The first record is handled without lag, so that a checkpoint right after it contains the sites.
        sample = self.next_sample(lag=0 if self.runner is None else 1) if number == 0 else None
        if self._waits(number) or sample is not None:
            act = lambda _: self._guard(self._act, number, sample)  # noqa: E731
            self._later[number] = when_hooks_are_done(optimizer, act)

    def _waits(self, number: int) -> bool:
        """Returns whether decisions wait for this optimizer."""
        return self.runner is not None and self.carried_out[number] < len(self.runner.decisions)

    def next_sample(self, *, lag: int) -> Sample | None:
        """Returns the next record to decide on, from at least `lag` steps before the last step, or None."""
        sample = self.monitor.sample_before(self.monitor.steps - lag) or self.carried
        steps = self.recording.history.steps
        return sample if sample is not None and (not len(steps) or sample.step > steps[-1]) else None

    def _act(self, number: int, sample: Sample | None) -> None:
        """Handles the record and carries out decisions; called after all hooks of the step have run."""
        if self.runner is None:
            assert sample is not None  # no decision is pending before the policy has started
            self._begin(sample)
        elif sample is not None:
            self._see(sample)
        known, actuator = self.runner, self.actuator
        if not self._waits(number) or known is None or actuator is None:
            return
        actuator.compiled = self.monitor.compiled
        done, self.carried_out[number] = self.carried_out[number], len(known.decisions)
        for action, site, reason in actuator.set(active_actions(known.decisions, known.refused), number):
            if action is Action.NORM:
                self.carried_out[number] = done  # the other decisions are carried out after the next step
            asked = [i for i, d in enumerate(known.decisions) if (d.action, d.site, d.release) == (action, site, False)]
            # All decisions that waited are refused, or the last one, if a remedy that was active is refused now.
            for i in [i for i in asked if i >= done] or asked[-1:]:
                refused = Refused(step=known.decisions[i].step, action=str(action), site=site, reason=reason)
                known.refuse(refused)
                self._note({"event": "refused", **dataclasses.asdict(refused), "text": f"refused {action}: {reason}"})

    def _see(self, sample: Sample) -> None:
        known = self.runner
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
            held = active_actions(known.decisions, known.refused)
            closer = [parse(spec)[0].options for (spec, _), (action, _) in held.items() if action is Action.WATCH]
            self.monitor.closer = int(closer[0]["every"]) if closer else None

    def _begin(self, sample: Sample) -> None:
        """Starts the policy on the sites of the first record, and finds out what they refuse."""
        sites = {site.name: site for site in self.monitor.sites}
        facts = []
        for name in sample.layers:
            site = sites.get(name)
            unknown = "this process did not find it" if site is None else ""
            if site is not None and not site.verified:
                unknown = site.unverified or site.why or "its weights are not known"
            n = sample.heads["max_logit"].shape[1] if site is None else site.n_heads
            facts.append(SiteFacts(name=name, n_heads=n, unknown=unknown))
        missed = [str(one) for one in self.monitor.missed]
        # All processes must agree on the sites, or their policies would decide differently.
        dist.run_on_all("qkeel.autopilot", lambda: (facts, missed), repr, lambda _: None, patience=dist.PATIENCE)
        known = self.start(facts, missed, list(sites.values()))
        assert self.actuator is not None
        for action, site, reason in self.actuator.try_all():
            known.refuse(Refused(step=-1, action=str(action), site=site, reason=reason))
        start = begun(self.spec, known, self.recording.planned)
        if dist.rank() == 0 and (missed or any(site.unknown for site in facts)):
            caution(str(start["text"]))
        self._note({**start, "step": sample.step})

    def _note(self, row: Row) -> None:
        self.events.append(row)
        self.monitor.event(row)


# The public entry points, which check their arguments.

EVERY = 10  # steps


@accepts_earlier_calls("qkeel.autopilot(model, optimizer, batch=batch)", renamed={"example": "batch"})
def autopilot(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy = "ladder",
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
        policy: "ladder" with options ("ladder:threshold=50,allow_new_parameters=true"), or your own Policy.
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
    optimizers = _several(optimizer)
    chosen = known_policy(policy)
    sites = None
    if batch is not None:
        sites = find_sites(unwrapped(model), batch) if isinstance(model, nn.Module) else None
    monitor = watch(model, optimizers[0], every=every, sinks=sinks, query_mask=query_mask, planned=planned, sites=sites)
    return attach(monitor, optimizers, policy=policy if isinstance(policy, str) else chosen, batch=batch)


@accepts_earlier_calls("attach(monitor, optimizer, batch=batch)", renamed={"example": "batch"})
def attach(
    monitor: Monitor,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy = "ladder",
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
    optimizers = _several(optimizer)
    chosen = known_policy(policy)
    if not isinstance(monitor, Monitor):
        raise InvalidTypeError(f"expected the Monitor that qkeel.watch returns, got {type(monitor).__name__}")
    if monitor.history.phase == "train" and len(monitor.history):
        raise InvalidValueError(
            "expected a monitor that has recorded nothing yet; attach the autopilot before training"
        )
    return Autopilot(monitor, optimizers, chosen, policy if isinstance(policy, str) else repr(chosen), batch)


def _several(given: object) -> list[Optimizer]:
    several = list(given) if isinstance(given, Sequence) else [given]
    found = [innermost(one) for one in several if isinstance(one, Optimizer)]
    for one in several:
        if not isinstance(one, Optimizer):
            raise InvalidTypeError(
                f"expected the optimizer that updates the model, got {type(one).__name__}; call "
                "qkeel.autopilot(model, optimizer)"
            )
    if not several:
        raise InvalidTypeError("expected at least one optimizer, got an empty list")
    return found
