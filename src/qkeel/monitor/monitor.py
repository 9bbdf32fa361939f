"""The monitor of a training run, and what it does at the end of each step and of the run."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.example import Arguments
from qkeel.distributed.layout import Layout
from qkeel.errors import AlarmWarning, InvalidValueError, RefusedError, caution
from qkeel.frames import Foreign
from qkeel.handle import Handle, State, under
from qkeel.heads.site import AttentionSite, Sites, UnrecognizedAttention
from qkeel.monitor.alarms import fitted, rules_for
from qkeel.monitor.cadence import Cadence, MeasuredSteps
from qkeel.monitor.call_statistics import CallStatistics, SettingSeen, wanted
from qkeel.monitor.gather import Measurement, Stats, merged, on_host
from qkeel.monitor.history import History, PlannedRates
from qkeel.monitor.journal import PendingResults, Recorder
from qkeel.monitor.logit_changes import LogitChanges
from qkeel.monitor.measure import StepNumbers, WatchedModels
from qkeel.monitor.nan_origin import NOT_FOUND, NanOrigin
from qkeel.monitor.processes import Handshake, ProcessGroup
from qkeel.monitor.record import (
    Sample,
    about,
    coverage,
    sample_html,
    sample_line,
    sample_table,
)
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sinks import Sink
from qkeel.monitor.token_classes import Classes, PassTokens, QueryMaskSource
from qkeel.monitor.watched_sites import WatchedSites
from qkeel.patching.forward import owners, unwrapped
from qkeel.patching.modes import FaultGuard, joined
from qkeel.patching.optimizers import StepHooks, stepping, steps_taken
from qkeel.patching.roles import Phase
from qkeel.sites.tap import Tap

# The end of a step, which passes its numbers on, and the end of training, which measures the final weights.

NOT_SEEN = (
    "the optimizer stepped, but no forward pass of the watched model was seen. Call the model itself, model(...), "
    "rather than model.forward(...) or one of its parts, and watch the object that you call: if torch.compile returned "
    "it, pass that object to watch(); if a compiled function calls the model, compile the model instead"
)
NOT_TRAINED = (
    "the optimizer stepped, but no gradient had reached what the watched model returned in any of its {:,} passes, so "
    "none of them counts as trained. Watch the model whose output the loss is computed from"
)
NO_STEP = (
    "the model made training passes, but the optimizer that is watched took no step, so nothing was recorded. If "
    "another optimizer updates the model, pass that one: qkeel.watch(model, optimizer)"
)


@final
class StepEnd:
    """Reads the statistics of a step from the taps, adds the other numbers of the step, and sends everything on."""

    def __init__(
        self,
        steps: MeasuredSteps,
        models: WatchedModels,
        group: ProcessGroup,
        arrivals: PendingResults,
        *,
        guard: FaultGuard,
        dropped: Callable[[], int],
        latest: Callable[[], Sample | None],
    ) -> None:
        """guard: the monitor's guard, which measures the time it spends. dropped: returns the number of sinks that were
        dropped after an error. latest: returns the latest sample of trained passes that has arrived."""
        self._latest = latest
        self._noted: Sample | None = None  # of which the cadence knows
        self._steps, self._models, self._group, self._arrivals = (
            steps,
            models,
            group,
            arrivals,
        )
        self._guard, self._dropped = guard, dropped
        self._calls: dict[Phase, float] = {
            "train": 0,
            "eval": 0,
        }  # counted up to the previous measured step
        self._seconds = 0.0
        self._taken: dict[Phase, list[Stats]] = {
            "train": [],
            "eval": [],
        }  # read before the end of their step
        self.rate: float | Tensor | None = None  # of the last step done
        self._warned = False

    def take(self, phase: Phase) -> Stats:
        """Returns the statistics of the current step so far, on the CPU; they remain part of that step's statistics."""
        recent = on_host(self._models.read(phase))
        if recent:
            self._taken[phase].append(recent)
        return self._group.placed(recent)

    def group_places(self, stats: Stats) -> Stats:
        """Returns these statistics on the CPU, at this process's place in the layout."""
        return self._group.placed(on_host(stats)) if stats else stats

    def pass_over(self, phase: Phase) -> None:
        """Ends a step when there is no optimizer; such a step is one forward pass of each model."""
        self._close(phase, self._steps.rounds(phase) - 1, None, alone=True)
        self._note_top()

    def before(self, optimizer: Optimizer) -> None:
        """Must be called before each optimizer step."""
        self._models.settle(decide=True)
        if self._steps.step_due and not self._group.stopped:
            # The factor by which the gradients are still multiplied, because GradScaler lets a fused optimizer unscale.
            scale = vars(optimizer).get("grad_scale")
            self._models.before_step(scale if isinstance(scale, Tensor) else None)

    def after(self, optimizer: Optimizer) -> None:
        """Must be called after each optimizer step. What was measured for a skipped step counts towards the next
        step."""
        self._models.settle(
            decide=True
        )  # the passes in a closure that the step has called again
        infinite = vars(optimizer).get(
            "found_inf"
        )  # GradScaler calls a fused optimizer even then
        if isinstance(infinite, Tensor) and bool(infinite.any()):
            return
        try:
            self.evaluated()
            rate = _rate(optimizer)
            if self._steps.step_due:
                # The weights that this step's forward passes used are the result of the previous step.
                self._train_step(rate if self.rate is None else self.rate)
            self.rate = rate
        finally:
            self._steps.stepped()
        self._arrivals.settle(wait=False)
        self._note_top()

    def _note_top(self) -> None:
        """Tells the cadence the latest largest logit."""
        sample = self._latest()
        if sample is not None and sample is not self._noted:
            self._noted = sample
            self._steps.recorded(sample.step, sample.overall("max_logit"))

    def training_over(self) -> None:
        """Must be called after the last step, once the final weights have been measured."""
        self._close("train", self._steps.done, self.rate, alone=False)

    def evaluated(self) -> None:
        """Ends the evaluation passes since the last step, if there were any."""
        if self._models.has("eval") or self._taken["eval"]:
            self._close("eval", self._steps.done, None, alone=True)

    def _itself(self, phase: Phase, stats: Stats, seconds: float) -> dict[str, float]:
        """Returns the monitor's statistics on its own work since the previous measured step, keyed by the names in
        records.MONITOR_FIELDS."""
        found = self._models.coverage(phase, stats)
        found["calls"] -= self._calls[phase]
        found["errors"] += self._dropped()
        found["milliseconds"] = 1000 * (seconds - self._seconds)
        return found

    def _train_step(self, rate: float | Tensor) -> None:
        if not self._steps.passed("train") and not self._warned:
            self._warned = True
            others = self._steps.passed("eval")
            caution(NOT_TRAINED.format(others) if others else NOT_SEEN)
        if self._models.has("train"):
            self._models.after_step()
        self._close("train", self._steps.done, rate, alone=False)

    def _close(
        self, phase: Phase, step: int, rate: float | Tensor | None, *, alone: bool
    ) -> None:
        """Sends the numbers of a phase on; with `alone`, only this process records them."""
        fresh, taken = self._models.read(phase), self._taken[phase]
        self._taken[phase] = []
        if taken:
            fresh = on_host(fresh)
        stats = merged([*taken, fresh])
        numbers = (
            self._models.take(None if rate is None else _rate_tensor(rate))
            if phase == "train"
            else {}
        )
        if not alone:
            self._arrivals.settle(
                wait=self._group.several
            )  # a process that has stopped joins no exchange
        seconds = self._guard.seconds
        own = self._itself(phase, stats, seconds)
        measured = Measurement(stats=stats, numbers=numbers) if stats else None
        transfer = self._group.send(measured, own, alone=alone)
        if transfer is not None:
            self._calls[phase], self._seconds = (
                self._calls[phase] + own["calls"],
                seconds,
            )
            unread = self._group.placed(fresh) if taken else None
            self._arrivals.add(step, phase, transfer, unread=unread, monitor=own)
            if phase == "train":
                self._steps.measured(step)
        self._arrivals.settle(wait=False)


def _rate(optimizer: Optimizer) -> float | Tensor:
    """The current learning rate of the first parameter group."""
    rate = optimizer.param_groups[0]["lr"]
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def _rate_tensor(rate: float | Tensor) -> Tensor:
    """The same rate as a tensor, which most steps do not need."""
    return (
        rate
        if isinstance(rate, Tensor)
        else torch.scalar_tensor(rate, dtype=torch.float64)
    )


@final
class TrainingEnd:
    """Measures the weights after the last step, unless that step was measured or the record could be wrong.

    To detect that these weights were replaced, for example by a checkpoint or an average, the norm of one of them is
    computed after each step and after the optimizer's other hooks, without waiting for the device.
    """

    def __init__(
        self,
        steps: MeasuredSteps,
        models: WatchedModels,
        group: ProcessGroup,
        step_end: StepEnd,
        optimizer: Optimizer | None,
        *,
        guard: FaultGuard,
    ) -> None:
        self._steps, self._models, self._group, self._step_end = (
            steps,
            models,
            group,
            step_end,
        )
        self._optimizer, self._guard = optimizer, guard
        self._asked: int | None = (
            None  # the number of steps done when the end was requested
        )
        self._norm = torch.tensor(torch.nan)
        self.hooks: StepHooks | None = None
        if optimizer is not None and dist.world() == 1:
            note = functools.partial(guard, self._note)
            self.hooks = StepHooks(None, note, optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        self._norm = _norm(optimizer)

    def skip(self) -> None:
        """Prevents the final weights from being measured."""
        self._asked = self._steps.done

    def measure(self) -> None:
        """Measures the current weights.

        Raises: RefusedError; see `Monitor.measure_end`.
        """
        self.skip()
        self._models.settle(decide=True)
        if self._steps.last is not None and self._steps.last >= self._steps.done:
            return
        if dist.world() > 1 or self._group.members is not None:
            raise RefusedError(
                "several processes train, and an extra pass in only one of them could wait for the others forever; "
                "if the last step is known in advance, pass planned=PlannedRates.of(rates) or call measure_next() "
                "before that step"
            )
        if self._optimizer is None or not self._steps.done or stepping():
            raise RefusedError("no finished step of an optimizer was seen")
        try:
            seen = self._models.look_again()
        except Exception as error:
            raise RefusedError(
                f"the model failed in an extra pass: {type(error).__name__}: {error}"
            ) from error
        if not seen:
            raise RefusedError("no training pass with attention was seen")
        self._guard(self._step_end.training_over)

    def measure_or_tell(self, tell: Callable[[str], None]) -> None:
        """Measures the weights of the last step; if that is impossible, calls `tell` once with the reason."""
        self._models.settle(decide=True)
        if (
            self._optimizer is not None
            and not self._steps.done
            and self._models.has("train")
        ):
            self.skip()
            if dist.rank() == 0:
                tell(NO_STEP)
        if (
            self._asked == self._steps.done
            or self._optimizer is None
            or not self._missing
        ):
            return
        last = self._steps.last
        try:
            if sys.exception() is not None:
                raise RefusedError("an exception is being handled")
            if self.hooks is not None and _changed(self._norm, _norm(self._optimizer)):
                raise RefusedError(
                    "its weights were changed after its last step, for example by loading a checkpoint or averaging "
                    "weights"
                )
            self.measure()
        except RefusedError as error:
            self.skip()
            if last is not None and dist.rank() == 0:
                name = type(self._models.whole).__name__
                tell(
                    f"{name} is measured up to step {last:,} of {self._steps.done:,}: {error}"
                )

    @property
    def _missing(self) -> bool:
        last = self._steps.last
        return last is None or last < self._steps.done - 1


def _norm(optimizer: Optimizer) -> Tensor:
    """The norm of a weight from the middle of the largest parameter group that has an unsharded weight; 0 if no group
    has one."""
    for group in sorted(
        optimizer.param_groups, key=lambda group: -len(group["params"])
    ):
        own = group["params"]
        for p in (*own[len(own) // 2 :], *own):
            if type(p) is nn.Parameter:
                return torch.linalg.vector_norm(p.detach())
    return torch.zeros(())


def _changed(before: Tensor, now: Tensor) -> bool:
    then, here = float(before), float(now)
    return here != then and not (here != here and then != then)


# The Monitor, which measures the attention of a model while it trains.

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
        optimizer: Optimizer | None,
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
        own = {name: unwrapped(one) for name, one in model.items()}
        whole = own[""] if "" in own else nn.ModuleDict(own)
        setting, (main, extras) = SettingSeen(), wanted(stats)
        self._steps = MeasuredSteps(every, model, by_optimizer=optimizer is not None)
        if planned is not None:
            self._steps.besides.add(planned.steps - 1)
        if optimizer is not None:
            # It is called in the first pass, when a script that is resumed has loaded its checkpoint.
            self._steps.continued = functools.partial(steps_taken, optimizer)
        self._guard = FaultGuard(_OFF, self._switch_off)
        introduced = Handshake(whole, lambda: self.sites, layout)
        self._models = WatchedModels(whole, introduced.stages)
        self._group = ProcessGroup(
            introduced, lambda: JOINED if any(map(joined, model.values())) else ""
        )
        self._journal = Recorder(
            sinks,
            lambda: fitted(
                rules_for(setting.of(self.sites)) if rules is None else rules,
                self.model,
                self.sites,
            ),
            planned,
            lambda: {
                **about(self.model, self.sites, self.missed, optimizer, every),
                **self._group.about(),
            },
            lambda: self._models.types,
            lambda: self._group.leads,
        )
        self._arrivals = PendingResults(self._group, self._journal)
        self._step_end = StepEnd(
            self._steps,
            self._models,
            self._group,
            self._arrivals,
            guard=self._guard,
            dropped=lambda: self._journal.dropped,
            latest=lambda: self._journal.before(sys.maxsize),
        )
        self._end = TrainingEnd(
            self._steps,
            self._models,
            self._group,
            self._step_end,
            optimizer,
            guard=self._guard,
        )
        for name, one in model.items():
            calls = CallStatistics(
                PassTokens(query_mask.get(name), classes.get(name)), setting, main
            )
            due, rows = (
                functools.partial(self._steps.due, name),
                None if main is True else calls.of_rows,
            )
            tap = Tap(
                one,
                due=due,
                by_step=optimizer is not None,
                measure=calls.call,
                measure_rows=rows,
                measure_plain=None if "gates" in extras else calls.plain,
                keeps=True,
                guard=self._guard,
            )
            known = WatchedSites(name, tap.model, tap.sites, self._group, sites[name])
            changes = None if probe is None else LogitChanges(tap, probe)
            numbers = StepNumbers(
                known,
                calls.tokens,
                changes,
                optimizer,
                guard=self._guard,
                tree=tap.tree,
                extras=extras,
            )
            self._models.add(
                name,
                tap,
                numbers,
                self._steps.counted,
                self._step_end.pass_over if optimizer is None else None,
            )
        self._hooks: StepHooks | None = None
        if optimizer is None:
            self._group.records_alone = True
        else:
            before, after = (
                functools.partial(self._guard, f)
                for f in (self._before_step, self._after_step)
            )
            self._hooks = StepHooks(before, after, optimizer)
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
    def compiled(self) -> bool:
        """Returns whether any observed forward pass ran compiled code."""
        return any(tap.compiled for tap in self._models.taps)

    @property
    def steps(self) -> int:
        """The number of optimizer steps done; set it if the optimizer's state does not say where a run continues."""
        return self._steps.done

    @steps.setter
    def steps(self, done: int) -> None:
        self._models.settle(decide=False)
        if done != self.steps and self._steps.step_due and self._models.has("train"):
            self._steps.besides.add(
                done
            )  # measured for a step that was skipped; it counts for this one
        self._steps.done, self._steps.continued = done, None

    def measure_next(self) -> None:
        """Measures the current step regardless of the cadence; call it before the step's first forward pass.

        Use it for the last step of training, or for any other important step; if several processes train, all must call
        it.
        """
        self._steps.besides.add(
            self._steps.rounds("train") if self._hooks is None else self.steps
        )

    def measure_end(self) -> None:
        """Measures the final weights if the last step was not known in advance, as `close()` and `with` do.

        Call this if the weights were changed since the last step, or if you need the numbers before watching ends.

        The state of the model after N steps is recorded at step N. It is measured in one more forward pass in training
        mode, on the batch of the last training pass; random number generators and buffers are restored afterwards.
        Gradients are not measured, because there is no backward pass. Nothing is done if there is a record of step N.
        `close()` and `with` do nothing if the last training pass, before step N, was measured.

        Raises:
            RefusedError: several processes train, no optimizer was given or it is in the middle of a step, no training
                pass was seen, or the extra pass fails.
        """
        if self.active:
            self._end.measure()

    def training_over(self, tell: Callable[[str], None] = caution) -> None:
        """Measures the final weights as `close()` does. If that is impossible, because of an error or because the
        weights have changed since the last step, calls `tell` with one sentence that names the last measured step."""
        if self.active:
            self._guard(self._end.measure_or_tell, tell)

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
        of finished steps cover all of them.
        """
        self._settle()
        wanted = phase or (
            "train"
            if self._arrivals.has("train") or self._models.has("train")
            else "eval"
        )
        stats = merged([self._arrivals.take(wanted), self._step_end.take(wanted)])
        return stats or self._step_end.group_places(self._models.peek(phase))

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
            self._guard(lambda: self._arrivals.settle(wait=False, before=step))
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
        return (
            f"<Monitor of {type(self.model).__name__}: {len(self.sites)} attention layers, {len(self.history):,} "
            f"records, "
            f"{len(self.alarms)} alarms{state}>"
        )

    def _repr_html_(self) -> str:
        sample, note = self._shown
        if sample is None:
            return "<p>nothing measured yet</p>"
        return sample_html(sample, self.alarms, note, root=self._root)

    @property
    def _shown(self) -> tuple[Sample | None, str]:
        """The sample that a table shows, and what is said below it."""
        latest, trained = self.sample, self._journal.before(sys.maxsize)
        others = latest is not None and latest.phase == "eval" and trained is not None
        line = (
            f"passes that were not trained: {sample_line(latest, self._root)}"
            if others and latest is not None
            else ""
        )
        return trained or latest, "; ".join(filter(None, [line, self._coverage]))

    @property
    def _root(self) -> str:
        return type(self.model).__name__

    @property
    def _coverage(self) -> str:
        said = coverage(len(self.sites), [str(missed) for missed in self.missed])
        error = self._guard.error
        off = (
            ""
            if error is None
            else f"the monitor switched itself off after a fault: {type(error).__name__}: {error}"
        )
        return "; ".join(filter(None, [said, off]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(complete=exc[0] is None)

    def remove(self) -> None:
        """Stops watching immediately; the run counts as complete. If several processes train, call it on all of
        them."""
        self._end.skip()
        self.close()

    def close(self, *, complete: bool = True) -> None:
        """Stops watching; `complete` says whether training ended as planned.

        If it did, the final weights are measured first, as by `measure_end`, unless the last step was already measured;
        if that is impossible, one warning is raised.
        """
        if self.active:
            self._journal.complete = complete
            try:
                if complete:
                    self._guard(self._end.measure_or_tell, caution)
            finally:
                super().remove()
        if self._hooks is not None:
            self._guard(
                self._hooks.remove
            )  # again, in case the first removal happened in the middle of a step
        if self._end.hooks is not None:
            self._guard(self._end.hooks.remove)
        if self._origin is not None:
            self._origin.remove()

    def _state(self) -> State:
        """The number of steps done, the last measured step, the last learning rate (-1 if there is none), the records
        and the alarms."""
        self.sample_before(self.steps)  # this waits for the last record
        last, rate = self._steps.last, self._step_end.rate
        state = {
            "steps": torch.tensor(self.steps),
            "last": torch.tensor(-1 if last is None else last),
        }
        own = {
            **state,
            "rate": torch.tensor(-1.0, dtype=torch.float64)
            if rate is None
            else _rate_tensor(rate).cpu(),
        }
        return own | {
            f"journal/{name}": value for name, value in self._journal.state().items()
        }

    def _load_state(self, state: State) -> None:
        self.steps = int(state["steps"])
        if int(state["last"]) >= 0:
            self._steps.measured(int(state["last"]))
        self._journal.load(under("journal/", state))
        self._step_end.rate = (
            None if float(state["rate"]) < 0 else state["rate"].clone()
        )

    def _finish(self) -> None:
        # Each call has its own guard, so that a failure does not prevent the calls after it.
        for tap in self._models.taps:
            self._guard(tap.remove)
        if not self._group.stopped:
            self._guard(functools.partial(self._models.settle, decide=True))
            self._guard(self._step_end.evaluated)
            self._guard(self._settle_all)
        self._guard(self._group.leave)
        self._guard(self._journal.close, self._guard.error is None)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._end.hooks is not None:
            self._end.hooks.come_last()
        self._step_end.before(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._step_end.after(optimizer)

    def _settle(self) -> None:
        if self.active:
            self._guard(self._settle_passes)
            self._guard(self._settle_all)

    def _settle_passes(self) -> None:
        # Without an optimizer, nothing but the reading of the numbers says that a pass will not be trained any more.
        self._models.settle(decide=self._hooks is None)

    def _settle_all(self) -> None:
        self._arrivals.settle(wait=True)

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
