"""The monitor of a training run, and what it does at the end of each step and of the run.

`sites.tap` measures the attention calls of a pass, which `capture.intercept` sees; the hooks around a step are in
`patching.optimizers`.
"""

from __future__ import annotations

import functools
import html
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.calls import SiteStatistics
from qkeel.capture.example import Arguments
from qkeel.capture.visible_pattern import LayerType
from qkeel.distributed.layout import Layout
from qkeel.errors import AlarmWarning, caution
from qkeel.handle import Handle, State, under
from qkeel.monitor.alarms import fitted, logit_limits, rules_for
from qkeel.monitor.cadence import Cadence, MeasuredSteps
from qkeel.monitor.call_statistics import CallStatistics, SettingSeen, wanted
from qkeel.monitor.forecast import PlannedRates
from qkeel.monitor.history import History
from qkeel.monitor.kept_logits import KeptLogits
from qkeel.monitor.logit_changes import LogitChanges
from qkeel.monitor.measure import StepNumbers
from qkeel.monitor.nan_origin import NOT_FOUND, NanOrigin
from qkeel.monitor.numbers import Number, NumberKey, StatsBySite
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.recorder import PendingStep, Recorder
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sample import Sample, about, coverage, sample_table, shown_samples
from qkeel.monitor.sinks import Sink
from qkeel.monitor.step_vector import on_host
from qkeel.monitor.token_classes import PassTokens
from qkeel.monitor.watched_sites import WatchedSites
from qkeel.patching.forward import owners, unwrapped
from qkeel.patching.guards import FaultGuard
from qkeel.patching.optimizers import StepHooks, steps_taken
from qkeel.patching.roles import Phase
from qkeel.patching.sharded_models import joined
from qkeel.sites.find import all_sites, within
from qkeel.sites.site import Sites, UnrecognizedAttention
from qkeel.sites.tap import Tap

JOINED = "in torch's Join context, processes end at different steps"
_OFF = "qkeel's monitor switched itself off: {}. The model continues unwatched; what was recorded is kept"
NOT_SEEN = (
    "the optimizer stepped, but no forward pass of the watched model was seen. Call the model itself, model(...), "
    "rather than model.forward(...) or one of its parts, and watch the object that you call: if torch.compile returned "
    "it, pass that object to watch(); if a compiled function calls the model, compile the model instead"
)
NOT_TRAINED = (
    "the optimizer stepped, but no gradient had reached what the watched model returned in any of its {:,} passes, so "
    "none of them counts as trained. Watch the model whose output the loss is computed from"
)
FORKED = (
    "this process was forked from the one in which the model is watched, so what it trains is not recorded. Call "
    "qkeel.watch in the process that trains"
)
NO_STEP = (
    "the model made training passes, but the optimizer that is watched took no step, so nothing was recorded. If "
    "another optimizer updates the model, pass that one: qkeel.watch(model, optimizer)"
)


@final
class Monitor(Handle):
    """Measures the attention of a model; created by `qkeel.watch`, removed by `remove()` or at the end of `with`.

    With an optimizer, a measurement at step s describes the model after s optimizer steps, over all micro-batches of
    the next step. If the optimizer's state counts steps before the first watched pass, as that of a resumed run does,
    the step numbers continue from there. Without an optimizer, each trained pass is a step.

    What was done with a pass decides about its role, not the model's mode. A pass is *trained* if a gradient reached
    what it returned before the optimizer stepped; its records have the phase "train", and alarms, forecasts, the
    autopilot and step remedies read them alone. All other passes are *untrained*: references, rollouts,
    log-probabilities, teachers, and evaluation in either mode; their records have the phase "eval" and are kept apart.
    Several trained passes before a step are one record, and a pass that gradient checkpointing repeats counts once.
    Without an optimizer, a pass in training mode counts as trained when it ends, if a gradient can reach its output.

    An internal fault causes one warning and switches the monitor off.

    Data flows in one direction: the taps measure calls, the end of the step collects the numbers in a vector, the group
    of processes merges them, the recorder records what arrives, and the rules and sinks read the record.
    """

    def __init__(
        self,
        model: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        every: Cadence,
        stats: bool | str,
        sinks: Sequence[Sink],
        rules: Sequence[Rule] | None,
        tokens: Mapping[str, PassTokens],
        probe: Arguments | None,
        planned: PlannedRates | None,
        sites: Mapping[str, Sites | None],
        layout: Layout | None,
    ) -> None:
        inner = {name: unwrapped(module) for name, module in model.items()}
        self._whole = inner[""] if "" in inner else nn.ModuleDict(inner)
        self._optimizers = list(optimizers)
        self._every = every
        self._rules = rules
        self._setting = SettingSeen()
        self._steps = MeasuredSteps(every, model, by_optimizer=bool(optimizers))
        # The last step of a plan is measured whatever the cadence says.
        if planned is not None:
            self._steps.besides.add(planned.steps - 1)
        # Everything that the user's program calls runs under this guard.
        self._guard = FaultGuard(_OFF, self._switch_off, forks=False)
        self._group = group = ProcessGroup(
            self._whole,
            lambda: self.sites,
            layout,
            lambda: JOINED if any(map(joined, model.values())) else "",
        )
        group.records_alone = not optimizers
        kept = KeptLogits()
        self._recorder = Recorder(
            group, sinks, planned, self._settled_rules, self._described, kept
        )
        self._models: dict[str, StepNumbers] = {}
        # The models that have made a pass since the last step, where each step is a pass of each.
        self._passed: dict[Phase, set[str]] = {"train": set(), "eval": set()}
        # What was read before the end of its step.
        self._taken: dict[Phase, list[StatsBySite]] = {"train": [], "eval": []}
        # What has been sent of the monitor's own counts.
        self._calls: dict[Phase, float] = {"train": 0, "eval": 0}
        self._seconds = 0.0
        # The latest sample of which the cadence knows.
        self._noted: Sample | None = None
        # The learning rate of the last step done, and the loss of the coming one if the training program hands it out.
        self._rate: float | Tensor | None = None
        self._loss: Tensor | None = None
        self._is_warned, self._is_complete = False, False
        self._is_warned_of_fork = False
        self._origin: NanOrigin | None = None
        self._hooks: StepHooks | None = None
        if optimizers:
            # It is called in the first pass, when a script that is resumed has loaded its checkpoint. Muon keeps no count.
            self._steps.continued = lambda: max(map(steps_taken, self._optimizers))
        main, extras = wanted(stats)
        for name, module in model.items():
            calls = CallStatistics(tokens[name], self._setting, main)
            tap = Tap(
                module,
                due=functools.partial(self._steps.due, name),
                by_step=bool(optimizers),
                measure=calls.call,
                # A kernel's rows have maxima alone, and plain calls skip what gates need.
                measure_rows=None if main is True else calls.of_rows,
                measure_plain=None if "gates" in extras else calls.plain,
                keeps=True,
                guard=self._guard,
            )
            self._models[name] = tap.visitor = StepNumbers(
                name,
                tap,
                WatchedSites(name, tap.model, tap.sites, group, sites[name]),
                tokens[name],
                None if probe is None else LogitChanges(tap, probe),
                functools.partial(self._role_known, name),
                kept,
                guard=self._guard,
                extras=extras,
            )
        if optimizers:
            after = functools.partial(self._guard, self._after_step)
            self._hooks = StepHooks(self._begin_step, after, optimizers[0])
        super().__init__(
            functools.partial(self._guard, self._finish),
            state=self._state,
            load=self._load_state,
        )

    @property
    def model(self) -> nn.Module:
        """The user's own module, without the wrappers of torch.compile and DistributedDataParallel; for several models,
        an nn.ModuleDict that contains them, so that the names of the sites are paths in it."""
        return self._whole

    @property
    def sites(self) -> Sites:
        """The attention sites of the model, found in the first measured pass."""
        return all_sites({x.name: x.tap.sites for x in self._in_order()})

    @property
    def missed(self) -> tuple[UnrecognizedAttention, ...]:
        """The attention layers that were detected but not recognised, and so are not watched."""
        return self.sites.missed

    @property
    def steps(self) -> int:
        """The number of optimizer steps done; set it if the optimizer's state does not say where a run continues."""
        return self._steps.done

    @steps.setter
    def steps(self, done: int) -> None:
        self._settle_roles(decide=False)
        if done != self.steps and self._steps.step_due and self._has("train"):
            # Measured for a step that was skipped; it counts for this one.
            self._steps.besides.add(done)
        self._steps.done, self._steps.continued = done, None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds another optimizer that trains the model; the steps that its state counts continue a run as well."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def measure_next(self) -> None:
        """Measures the current step regardless of the cadence; call it before the step's first forward pass.

        Use it for the last step of training, or for any other important step; if several processes train, all must call
        it.
        """
        rounds = self._steps.rounds("train")
        self._steps.besides.add(rounds if self._hooks is None else self.steps)

    def note_loss(self, loss: Tensor) -> None:
        """Records the loss of the coming optimizer step as the training program computes it, over all micro-batches, in
        place of the one that the model returned. Call it before the step."""
        self._loss = loss.detach()

    @property
    def closer(self) -> int | None:
        """If not None, every `closer`-th step is measured in addition to the steps that the cadence selects; must be
        the same on all processes."""
        return self._steps.closer

    @closer.setter
    def closer(self, every: int | None) -> None:
        self._steps.closer = every

    def event(self, event: Mapping[str, object]) -> None:
        """Sends an event to the sinks, after the first sample; see `Sink.event`."""
        self._recorder.event(event)

    def trace_nan(self, optimizers: Sequence[Optimizer]) -> None:
        """Names the origin of the first gradient that is not finite by an alarm; see `watch(nan=True)`."""
        self._origin = NanOrigin(self.model, optimizers, self._add_origin)

    def _add_origin(self, sentence: str) -> None:
        alarm = Alarm(
            rule="nan_origin",
            severity=Severity.CRITICAL,
            step=self._steps.done,
            value=math.nan,
            meaning=sentence,
            trend="",
            remedy="repair it and go on from a checkpoint before this step, after which every weight is NaN",
            source="the pass made again, every module's output and gradient looked at",
            cause="numbers that are not finite",
        )
        self._recorder.add_alarm(alarm)
        # The first process tells alarms, but the batch with the NaN may be another's.
        if dist.rank() > 0 and not sentence.startswith(NOT_FOUND):
            caution(f"process {dist.rank()}: {sentence}", AlarmWarning)

    @property
    def passes(self) -> int:
        """The number of forward passes so far, measured or not."""
        return self._steps.begun

    def read(self, phase: Phase | None = None) -> StatsBySite:
        """Returns the statistics of all passes measured since the last read, keyed by site name, on the CPU.

        Those of trained passes ("train") and of others ("eval") are kept apart. If no phase is given, the statistics of
        trained passes are returned or, if there were none, those of others. Passes whose role is not known yet are
        returned only if there is nothing else, and again when it is known. If several processes train, the statistics
        are those of finished steps, and cover all of them.
        """
        # Numbers on their way are waited for here, and nowhere in a training step.
        self._settle()
        is_trained = self._recorder.has("train") or self._has("train")
        shown_phase = phase or ("train" if is_trained else "eval")
        recent: StatsBySite = {}
        # A step that several processes measure together has no statistics before its end.
        if shown_phase == "eval" or not self._group.records_jointly:
            recent = on_host(self._merged(lambda tap: tap.take(shown_phase)))
        if recent:
            self._taken[shown_phase].append(recent)
        stats = SiteStatistics([self._recorder.take(shown_phase), recent])
        return dict(stats or on_host(self._merged(lambda tap: tap.peek(phase))))

    @property
    def sample(self) -> Sample | None:
        """The numbers of the last measured step, or None before the first."""
        self._settle()
        return self._recorder.sample

    def sample_before(self, step: int) -> Sample | None:
        """The numbers of the last training step that was measured before `step`. It waits for the numbers of that step
        but not of later steps, so every process gets the same answer. Only the last two samples are kept, so `step`
        must be later than the second-to-last measured step."""
        if self.active:
            self._guard(lambda: self._recorder.settle(wait=False, before=step))
        return self._recorder.before(step)

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms raised so far."""
        self._settle()
        return list(self._recorder.log.alarms)

    @property
    def history(self) -> History:
        """The history of the run; `phase` says whether it comes from training or evaluation."""
        self._settle()
        return self._recorder.history

    def table(self) -> str:
        """Returns the numbers of the last measured step, one line per layer, and the most severe alarms.

        They are those of trained passes, if there were any; passes that were not trained get one line.
        """
        self._settle()
        root = type(self.model).__name__
        sample, line = shown_samples(self._recorder.latest, root)
        if sample is None:
            return "nothing measured yet"
        notes = [line, coverage(len(self.sites), [str(x) for x in self.missed])]
        error = self._guard.error
        if error is not None:
            fault = f"{type(error).__name__}: {error}"
            notes.append(f"the monitor switched itself off after a fault: {fault}")
        note = "; ".join(filter(None, notes))
        return sample_table(sample, self.alarms, note, root=root)

    def __repr__(self) -> str:
        state = "" if self.active else ", closed"
        n_sites = len(self.sites)
        layers = f"{n_sites} attention layer{'s' * (n_sites != 1)}"
        return (
            f"<Monitor of {type(self.model).__name__}: {layers}, {len(self.history):,} "
            f"records, "
            f"{len(self.alarms)} alarms{state}>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table())}</pre>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(complete=exc[0] is None)

    def remove(self) -> None:
        """Stops watching immediately; the run counts as complete. If several processes train, call it on all of
        them."""
        self.close()

    def close(self, *, complete: bool = True) -> None:
        """Stops watching; `complete` says whether training ended as planned."""
        if self.active:
            self._is_complete = complete
            if complete and self._hooks is not None:
                self._guard(self._warn_without_steps)
            super().remove()
        if self._hooks is not None:
            # Again, in case the first removal happened in the middle of a step.
            self._guard(self._hooks.remove)
        # It keeps the batches of a step alive.
        if self._origin is not None:
            self._origin.remove()

    def _state(self) -> State:
        """The number of steps done, the last measured step, the last learning rate (-1 if there is none), the records
        and the alarms."""
        # This waits for the last record.
        self.sample_before(self.steps)
        last, rate = self._steps.last, self._rate
        no_rate = torch.tensor(-1.0, dtype=torch.float64)
        state = {
            "steps": torch.tensor(self.steps),
            "last": torch.tensor(-1 if last is None else last),
            "rate": no_rate if rate is None else as_tensor(rate).cpu(),
        }
        for name, value in self._recorder.state().items():
            # Their name in states that are stored.
            state[f"journal/{name}"] = value
        return state

    def _load_state(self, state: State) -> None:
        self.steps = int(state["steps"])
        if int(state["last"]) >= 0:
            self._steps.measured(int(state["last"]))
        self._recorder.load(under("journal/", state))
        self._rate = None if float(state["rate"]) < 0 else state["rate"].clone()

    def _finish(self) -> None:
        # Each call has its own guard, so that a failure does not prevent the calls after it.
        for tap in self._taps:
            self._guard(tap.remove)
        if not self._group.stopped:
            self._guard(functools.partial(self._settle_roles, decide=True))
            self._guard(self._close_evaluation)
            self._guard(lambda: self._recorder.settle(wait=True))
        self._guard(self._group.leave)
        is_sound = self._guard.error is None
        self._guard(self._recorder.close, self._is_complete and is_sound)

    def _settle(self) -> None:
        if self.active:
            # Without an optimizer, nothing but the reading of the numbers says that a pass will not be trained any
            # more.
            is_end = self._hooks is None
            self._guard(lambda: self._settle_roles(decide=is_end))
            self._guard(lambda: self._recorder.settle(wait=True))

    def _switch_off(self) -> None:
        """Switches off after a fault. The other processes learn it in their next exchange."""
        self._group.leave()
        self.close(complete=False)

    # What the recorder asks for once, when the first numbers arrive.

    def _settled_rules(self) -> Sequence[Rule]:
        rules = self._rules
        if rules is None:
            rules = rules_for(self._setting.facts())
        return fitted(rules, self.model, self.sites, self._optimizers)

    def _described(self) -> Mapping[str, object]:
        description = about(
            self.model, self.sites, self.missed, self._optimizers, self._every
        )
        return {**description, **self._group.about()}

    # The models. Usually there is one, whose name is "". Of several, the names of sites begin with the name of the model,
    # and a number of the whole model, such as the loss, is that of the last model that has it.

    def _in_order(self) -> list[StepNumbers]:
        if len(self._models) == 1:
            return [*self._models.values()]
        # Processes must send their numbers in the same order, whatever order the models are given in.
        stages = self._group.stages
        return sorted(self._models.values(), key=lambda x: stages.get(x.name) or 0)

    @property
    def _taps(self) -> list[Tap]:
        return [numbers.tap for numbers in self._in_order()]

    @property
    def is_in_step(self) -> bool:
        """Whether there are statistics of trained passes whose optimizer step has not come yet."""
        self._settle_roles(decide=False)
        return self._has("train")

    def _has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of the current step to read."""
        return any([numbers.tap.has(phase) for numbers in self._models.values()])

    def _merged(self, read: Callable[[Tap], StatsBySite]) -> StatsBySite:
        """Returns what is read from the taps, by the names of sites in all models."""
        if "" in self._models:
            return read(self._models[""].tap)
        return SiteStatistics(
            [
                {within(x.name, site): of_site for site, of_site in read(x.tap).items()}
                for x in self._in_order()
            ]
        )

    def _types(self) -> Mapping[str, LayerType]:
        """The types of the observed layers of all models."""
        types: dict[str, LayerType] = {}
        for name, numbers in self._models.items():
            of_model = numbers.sites.types.items()
            types |= {within(name, site): kind for site, kind in of_model}
        return types

    # A step: passes begin, get a role, and end in the optimizer's step.

    def _role_known(self, name: str, phase: Phase, measured: bool) -> None:
        """Counts a pass of a model. Without an optimizer, a step is over once every model has run, in any order."""
        self._steps.counted(name, phase)
        if measured and self._hooks is None:
            passed = self._passed[phase]
            passed.add(name)
            if len(passed) == len(self._models) and self._has(phase):
                passed.clear()
                self._close(phase, self._steps.rounds(phase) - 1, None, alone=True)
                self._note_top()

    def _settle_roles(self, *, decide: bool) -> None:
        """Sorts the passes whose role is known, or, to `decide`, all passes; see `Tap.settle`."""
        for tap in self._taps:
            tap.settle(decide=decide)

    def _begin_step(self, optimizer: Optimizer) -> None:
        if self._guard.is_forked and not self._is_warned_of_fork:
            self._is_warned_of_fork = True
            caution(FORKED)
        self._guard(self._before_step, optimizer)

    def _before_step(self, optimizer: Optimizer) -> None:
        # What no gradient has reached by now, none will: the step changes the weights.
        self._settle_roles(decide=True)
        if self._steps.step_due and not self._group.stopped:
            # The factor by which the gradients are still multiplied, because GradScaler lets a fused optimizer unscale.
            scale = vars(optimizer).get("grad_scale")
            for numbers in self._models.values():
                numbers.before_step(scale if isinstance(scale, Tensor) else None)

    def _after_step(self, optimizer: Optimizer) -> None:
        """Ends a step. What was measured for a skipped step counts towards the next step."""
        # The passes in a closure that the step has called again.
        self._settle_roles(decide=True)
        # GradScaler calls a fused optimizer even for a step that it skips.
        infinite = vars(optimizer).get("found_inf")
        if isinstance(infinite, Tensor) and bool(infinite.any()):
            return
        try:
            self._close_evaluation()
            rate = optimizer.param_groups[0]["lr"]
            rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
            if self._steps.step_due:
                self._warn_without_passes()
                for numbers in self._models.values() if self._has("train") else ():
                    numbers.after_step()
                # The weights that this step's forward passes used are the result of the previous step.
                of_weights = rate if self._rate is None else self._rate
                self._close("train", self._steps.done, of_weights, alone=False)
            self._rate = rate
        finally:
            self._loss = None
            self._steps.stepped()
        self._recorder.settle(wait=False)
        self._note_top()

    def _note_top(self) -> None:
        """Tells the cadence the latest largest logit, if it chooses steps by it."""
        sample = self._recorder.before(sys.maxsize) if self._steps.reads_tops else None
        if sample is not None and sample is not self._noted:
            self._noted = sample
            self._steps.recorded(sample.step, sample.overall("max_logit"))

    def _close_evaluation(self) -> None:
        """Ends the passes since the last step that were not trained, if there were any."""
        if self._has("eval") or self._taken["eval"]:
            self._close("eval", self._steps.done, None, alone=True)

    def _warn_without_passes(self) -> None:
        if not self._steps.passed("train") and not self._is_warned:
            self._is_warned = True
            # Passes that were seen but not trained have another cause than passes that were not seen.
            n_untrained = self._steps.passed("eval")
            caution(NOT_TRAINED.format(n_untrained) if n_untrained else NOT_SEEN)

    def _warn_without_steps(self) -> None:
        """Warns at the end of training if passes were trained, but no step was seen."""
        self._settle_roles(decide=True)
        if not self._steps.done and self._has("train") and dist.rank() == 0:
            caution(NO_STEP)

    def _close(
        self, phase: Phase, step: int, rate: float | Tensor | None, *, alone: bool
    ) -> None:
        """Sends the numbers of a phase on; with `alone`, only this process records them."""
        fresh, taken = self._merged(lambda tap: tap.take(phase)), self._taken[phase]
        self._taken[phase] = []
        # What was read before is on the host, and is merged there.
        if taken:
            fresh = on_host(fresh)
        stats = SiteStatistics([*taken, fresh]) if taken else fresh
        numbers: dict[NumberKey, Tensor | Number] = {}
        if phase == "train":
            if rate is not None:
                numbers["", "lr"] = as_tensor(rate)
            for of_model in self._in_order():
                numbers |= of_model.take()
            if self._loss is not None:
                numbers["", "train_loss"] = Number(self._loss, 1)
        if not alone:
            # A process that has stopped joins no exchange.
            self._recorder.settle(wait=self._group.several)
        counts = self._counts(phase, stats)
        vector = self._group.send(stats, numbers, alone=alone)
        if vector is not None:
            self._calls[phase] += counts["calls"]
            self._seconds += counts.get("milliseconds", 0.0) / 1000
            pending = PendingStep(
                step,
                phase,
                vector,
                counts,
                # `read` has handed out the rest of this step already.
                unread=fresh if taken else None,
                types=self._types(),
                limits=logit_limits(self.sites) if phase == "train" else {},
            )
            self._recorder.expect(pending)
            if phase == "train":
                self._steps.measured(step)
        self._recorder.settle(wait=False)

    def _counts(self, phase: Phase, stats: StatsBySite) -> dict[str, float]:
        """How much of the models these statistics cover, and the monitor's own work since the previous measured step,
        keyed by the names in records.MONITOR_FIELDS."""
        models = [*self._models.values()]
        names: list[str] = []
        for x in models:
            of_model = [site.name for site in x.tap.sites]
            names += [within(x.name, site) for site in of_model] if x.name else of_model
        calls = sum([x.tap.calls_seen[phase] for x in models])
        counts = {
            "calls": calls - self._calls[phase],
            "silent": len(set(names).difference(stats)),
        }
        # Of passes beside a step that is also trained, its record has the time of all.
        if phase == "train" or not self._has("train"):
            counts["milliseconds"] = 1000 * (self._guard.seconds - self._seconds)
        return counts


def as_tensor(rate: float | Tensor) -> Tensor:
    """A learning rate as a tensor, which most steps do not need."""
    if isinstance(rate, Tensor):
        return rate
    return torch.scalar_tensor(rate, dtype=torch.float64)


def watched(model: nn.Module) -> bool:
    """Returns whether a Monitor watches this model; a shallow copy shares the hooks of a model but is not watched."""
    taps = [tap for tap in owners(model) if isinstance(tap, Tap)]
    return any(
        isinstance(tap.visitor, StepNumbers) and tap.model is unwrapped(model)
        for tap in taps
    )
