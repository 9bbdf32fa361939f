"""The monitor of a training run, and what it does at the end of each step and of the run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.calls import SiteStatistics
from qkeel.capture.example import Arguments
from qkeel.distributed.layout import Layout
from qkeel.errors import AlarmWarning, InvalidValueError, caution
from qkeel.frames import Foreign
from qkeel.frames.tables import markup
from qkeel.handle import Handle, State, under
from qkeel.monitor.alarms import fitted, logit_limits, rules_for
from qkeel.monitor.cadence import Cadence, MeasuredSteps
from qkeel.monitor.call_statistics import CallStatistics, SettingSeen, wanted
from qkeel.monitor.forecast import PlannedRates
from qkeel.monitor.history import History
from qkeel.monitor.journal import Recorder
from qkeel.monitor.logit_changes import LogitChanges
from qkeel.monitor.measure import StepNumbers
from qkeel.monitor.nan_origin import NOT_FOUND, NanOrigin
from qkeel.monitor.numbers import Stats
from qkeel.monitor.other_steps import OtherSteps
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.record import (
    Sample,
    about,
    coverage,
    sample_table,
    shown_samples,
)
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sinks import Sink
from qkeel.monitor.step_end import WatchedModels, as_tensor
from qkeel.monitor.token_classes import Classes, PassTokens, QueryMaskSource
from qkeel.monitor.watched_sites import WatchedSites
from qkeel.patching.forward import owners, unwrapped
from qkeel.patching.modes import FaultGuard, joined
from qkeel.patching.optimizers import StepHooks, steps_taken
from qkeel.patching.roles import Phase
from qkeel.sites.site import AttentionSite, Sites, UnrecognizedAttention
from qkeel.sites.tap import Tap

JOINED = "in torch's Join context, processes end at different steps"
_OFF = "qkeel's monitor switched itself off: {}. The model continues unwatched; what was recorded is kept"


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

    Data flows in one direction: the tap measures calls, the end of the step collects the numbers, the group of
    processes merges them, the journal records what arrives, and the rules and sinks read the record.
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
        query_mask: Mapping[str, QueryMaskSource],
        classes: Mapping[str, Classes],
        probe: Arguments | None,
        planned: PlannedRates | None,
        sites: Mapping[str, Sites | None],
        layout: Layout | None,
    ) -> None:
        inner = {name: unwrapped(module) for name, module in model.items()}
        root = inner[""] if "" in inner else nn.ModuleDict(inner)
        setting, (main, extras) = SettingSeen(), wanted(stats)
        by_step = bool(optimizers)
        self._optimizers = optimizers = list(optimizers)
        self._steps = MeasuredSteps(every, model, by_optimizer=by_step)
        # The last step of a plan is measured whatever the cadence says.
        if planned is not None:
            self._steps.besides.add(planned.steps - 1)
        if optimizers:
            # It is called in the first pass, when a script that is resumed has loaded its checkpoint. Muon keeps no count.
            self._steps.continued = lambda: max(map(steps_taken, optimizers))
        # Everything that the user's program calls runs under this guard.
        self._guard = FaultGuard(_OFF, self._switch_off)
        self._group = group = ProcessGroup(
            root,
            lambda: self.sites,
            layout,
            lambda: JOINED if any(map(joined, model.values())) else "",
        )
        group.records_alone = not by_step

        def settled_rules() -> Sequence[Rule]:
            settled = rules_for(setting.of(self.sites)) if rules is None else rules
            loaded = self._models.weights_not_finite
            return fitted(settled, self.model, self.sites, self._optimizers, loaded)

        def described() -> dict[str, object]:
            description = about(self.model, self.sites, self.missed, optimizers, every)
            return {**description, **group.about()}

        self._journal = Recorder(
            group,
            sinks,
            settled_rules,
            planned,
            described,
            lambda: self._models.types,
            lambda: logit_limits(self.sites),
        )
        self._models = WatchedModels(
            root, self._steps, group, self._journal, self._guard
        )
        self._other_steps: OtherSteps | None = None
        if optimizers:
            self._other_steps = OtherSteps(self._models, optimizers[0])
        for name, module in model.items():
            tokens = PassTokens(query_mask.get(name), classes.get(name))
            calls = CallStatistics(tokens, setting, main)
            tap = Tap(
                module,
                due=functools.partial(self._is_due, name),
                by_step=by_step,
                measure=calls.call,
                # A kernel's rows have maxima alone, and plain calls skip what gates need.
                measure_rows=None if main is True else calls.of_rows,
                measure_plain=None if "gates" in extras else calls.plain,
                keeps=True,
                guard=self._guard,
            )
            numbers = StepNumbers(
                name,
                tap,
                WatchedSites(name, tap.model, tap.sites, group, sites[name]),
                tokens,
                None if probe is None else LogitChanges(tap, probe),
                optimizers,
                guard=self._guard,
                extras=extras,
            )
            self._models.add(numbers, by_step=by_step)
            if self._other_steps is not None:
                numbers.pass_ended = self._other_steps.pass_ends
        self._hooks: StepHooks | None = None
        if optimizers:
            before, after = (
                functools.partial(self._guard, f)
                for f in (self._models.before, self._after_step)
            )
            self._hooks = StepHooks(before, after, optimizers[0])
        self._origin: NanOrigin | None = None
        super().__init__(
            functools.partial(self._guard, self._finish),
            state=self._state,
            load=self._load_state,
        )

    @property
    def model(self) -> nn.Module:
        """The user's own module, without the wrappers of torch.compile and DistributedDataParallel; for several models,
        an nn.ModuleDict that contains them, so that the names of the sites are paths in it."""
        return self._models.whole

    @property
    def sites(self) -> Sites:
        """The attention sites of the model, found in the first measured pass."""
        return self._models.sites

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
        self._models.settle(decide=False)
        if done != self.steps and self._steps.step_due and self._models.has("train"):
            # Measured for a step that was skipped; it counts for this one.
            self._steps.besides.add(done)
        self._steps.done, self._steps.continued = done, None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds another optimizer that trains the model; the steps that its state counts continue a run as well."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def _is_due(self, name: str, candidate: bool, training: bool) -> tuple[bool, bool]:
        """As in `MeasuredSteps.due`, for the pass of a model that begins."""
        if candidate and self._other_steps is not None:
            self._other_steps.pass_begins()
        return self._steps.due(name, candidate, training)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._other_steps is not None:
            self._other_steps.stepped()
        self._models.after(optimizer)

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
        self._models.loss = loss.detach()

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
        self._journal.event(event)

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
        self._journal.add_alarm(alarm)
        # The first process tells alarms, but the batch with the NaN may be another's.
        if dist.rank() > 0 and not sentence.startswith(NOT_FOUND):
            caution(f"process {dist.rank()}: {sentence}", AlarmWarning)

    @property
    def passes(self) -> int:
        """The number of forward passes so far, measured or not."""
        return self._steps.begun

    @property
    def empty_passes(self) -> int:
        """The number of passes with an empty batch (no sequences or no tokens), which are not measured."""
        return sum(tap.empty for tap in self._models.taps)

    def read(self, phase: Phase | None = None) -> Stats:
        """Returns the statistics of all passes measured since the last read, keyed by site name, on the CPU.

        Those of trained passes ("train") and of others ("eval") are kept apart. If no phase is given, the statistics of
        trained passes are returned or, if there were none, those of others. Passes whose role is not known yet are
        returned only if there is nothing else, and again when it is known. If several processes train, the statistics
        are those of finished steps, and cover all of them.
        """
        # Numbers on their way are waited for here, and nowhere in a training step.
        self._settle()
        shown_phase = phase or (
            "train"
            if self._journal.has("train") or self._models.has("train")
            else "eval"
        )
        stats = SiteStatistics(
            [self._journal.take(shown_phase), self._models.take(shown_phase)]
        )
        return dict(stats or self._models.peek(phase))

    def include(self, *sites: AttentionSite) -> Self:
        """Also watches sites that were described by hand (`qkeel.sites.describe`); call it before the first pass.

        Raises: InvalidValueError if a site was not described by hand, or if a forward pass has already been seen.
        """
        if any(site.description is None for site in sites) or self.passes:
            raise InvalidValueError(
                "expected sites from qkeel.sites.describe(model, name, ...) before the first forward pass; all other "
                "sites are found automatically"
            )
        self._models.include(sites)
        return self

    @property
    def sample(self) -> Sample | None:
        """The numbers of the last measured step, or None before the first."""
        self._settle()
        return self._journal.sample

    def sample_before(self, step: int) -> Sample | None:
        """The numbers of the last training step that was measured before `step`. It waits for the numbers of that step
        but not of later steps, so every process gets the same answer. Only the last two samples are kept, so `step`
        must be later than the second-to-last measured step."""
        if self.active:
            self._guard(lambda: self._journal.settle(wait=False, before=step))
        return self._journal.before(step)

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms raised so far."""
        self._settle()
        return list(self._journal.log.alarms)

    @property
    def history(self) -> History:
        """The history of the run, for rules and plots; `phase` says whether it comes from training or evaluation."""
        self._settle()
        return self._journal.history

    def table(self) -> str:
        """Returns the numbers of the last measured step, one line per layer, and the most severe alarms.

        They are those of trained passes, if there were any; passes that were not trained get one line.
        """
        sample, note = self._shown
        return (
            "nothing measured yet"
            if sample is None
            else sample_table(sample, self.alarms, note, root=self._root)
        )

    def plot(
        self, what: str = "drift", *, field: str | None = None, ax: Foreign = None
    ) -> Foreign:
        """Draws the history of the run with matplotlib and returns the Axes; see `History.plot`."""
        return self.history.plot(what, field=field, ax=ax)

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
        return markup("<pre>{}</pre>", self.table())

    @property
    def _shown(self) -> tuple[Sample | None, str]:
        """The sample that a table shows, and what is said below it."""
        self._settle()
        sample, line = shown_samples(self._journal.latest, self._root)
        return sample, "; ".join(filter(None, [line, self._coverage]))

    @property
    def _root(self) -> str:
        return type(self.model).__name__

    @property
    def _coverage(self) -> str:
        share = coverage(len(self.sites), [str(missed) for missed in self.missed])
        error = self._guard.error
        off = (
            ""
            if error is None
            else f"the monitor switched itself off after a fault: {type(error).__name__}: {error}"
        )
        return "; ".join(filter(None, [share, off]))

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
            self._journal.complete = complete
            if complete and self._hooks is not None:
                self._guard(self._models.warn_without_steps)
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
        last, rate = self._steps.last, self._models.rate
        no_rate = torch.tensor(-1.0, dtype=torch.float64)
        state = {
            "steps": torch.tensor(self.steps),
            "last": torch.tensor(-1 if last is None else last),
            "rate": no_rate if rate is None else as_tensor(rate).cpu(),
        }
        for name, value in self._journal.state().items():
            state[f"journal/{name}"] = value
        return state

    def _load_state(self, state: State) -> None:
        self.steps = int(state["steps"])
        if int(state["last"]) >= 0:
            self._steps.measured(int(state["last"]))
        self._journal.load(under("journal/", state))
        self._models.rate = None if float(state["rate"]) < 0 else state["rate"].clone()

    def _finish(self) -> None:
        # Each call has its own guard, so that a failure does not prevent the calls after it.
        for tap in self._models.taps:
            self._guard(tap.remove)
        if not self._group.stopped:
            self._guard(functools.partial(self._models.settle, decide=True))
            self._guard(self._models.evaluated)
            self._guard(lambda: self._journal.settle(wait=True))
        self._guard(self._group.leave)
        self._guard(self._journal.close, self._guard.error is None)

    def _settle(self) -> None:
        if self.active:
            # Without an optimizer, nothing but the reading of the numbers says that a pass will not be trained any
            # more.
            is_end = self._hooks is None
            self._guard(lambda: self._models.settle(decide=is_end))
            self._guard(lambda: self._journal.settle(wait=True))

    def _switch_off(self) -> None:
        """Switches off after a fault. The other processes learn it in their next exchange."""
        self._group.leave()
        self.close(complete=False)


def watched(model: nn.Module) -> bool:
    """Returns whether a Monitor watches this model; a shallow copy shares the hooks of a model but is not watched."""
    taps = [tap for tap in owners(model) if isinstance(tap, Tap)]
    return any(
        isinstance(tap.visitor, StepNumbers) and tap.model is unwrapped(model)
        for tap in taps
    )
