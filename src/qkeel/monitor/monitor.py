"""The Monitor: measures the attention of a model while it trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Self, final

import torch
from torch import nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.capture.example import Arguments
from qkeel.dist.layout import Layout
from qkeel.errors import InvalidValueError, caution
from qkeel.frames import Foreign
from qkeel.handle import Handle, State, under
from qkeel.heads.site import AttentionSite, Missed, Sites
from qkeel.monitor.alarms.advice import fitted
from qkeel.monitor.alarms.forecast import PlannedRates
from qkeel.monitor.alarms.history import History
from qkeel.monitor.alarms.rule import Alarm, Rule
from qkeel.monitor.alarms.setup_rules import rules_for
from qkeel.monitor.cadence import Cadence, MeasuredSteps
from qkeel.monitor.measure.call_statistics import CallStatistics, SettingSeen, Wanted
from qkeel.monitor.measure.logit_changes import LogitChanges
from qkeel.monitor.measure.query_mask import QueryMask
from qkeel.monitor.measure.step_numbers import StepNumbers
from qkeel.monitor.measure.token_classes import Classes, PassTokens
from qkeel.monitor.measure.watched_models import WatchedModels
from qkeel.monitor.measure.watched_sites import WatchedSites
from qkeel.monitor.processes.arrivals import Arrivals
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.processes.introduction import Introduction
from qkeel.monitor.processes.transfer import Stats, merged
from qkeel.monitor.record.description import about
from qkeel.monitor.record.journal import Journal
from qkeel.monitor.record.sample import Sample
from qkeel.monitor.record.sample_table import coverage, sample_html, sample_table
from qkeel.monitor.record.sinks import Sink
from qkeel.monitor.step_end import StepEnd, TrainingEnd
from qkeel.patching.forward_passes import owners, unwrapped
from qkeel.patching.guard import Guard
from qkeel.patching.optimizer_hooks import StepHooks
from qkeel.patching.parallel_training import joined
from qkeel.sites.tap import Phase, Tap

JOINED = "in a context of torch's Join processes end at different steps"
_OFF = "qkeel's monitor switched itself off: {}. The model runs on unwatched; what was recorded is kept"


@final
class Monitor(Handle):
    """Measures the attention of a model; made by `qkeel.watch`, undone by `remove()` or at the end of `with`.

    With an optimizer a step is one of its steps, numbered by the steps done before it: what is measured at step s is
    the model after s steps, over all the micro-batches that go into the next. Without one each training pass is a
    step. Passes in eval mode are kept apart. A fault in here warns once and switches the monitor off.

    A number goes one way: the tap measures calls, the end of the step takes them, the group of processes merges them,
    what arrives is put on record, and the rules and sinks get the record.
    """

    _waited_for = False  # once it is closed: whether others will wait for this process at the next measured step

    def __init__(
        self,
        model: Mapping[str, nn.Module],
        optimizer: Optimizer | None,
        *,
        every: Cadence,
        stats: Wanted,
        sinks: Sequence[Sink],
        rules: Sequence[Rule] | None,
        query_mask: Mapping[str, QueryMask],
        classes: Mapping[str, Classes],
        probe: Arguments | None,
        planned: PlannedRates | None,
        sites: Mapping[str, Sites | None],
        layout: Layout | None,
    ) -> None:
        own = {name: unwrapped(one) for name, one in model.items()}
        whole = own[""] if "" in own else nn.ModuleDict(own)
        setting = SettingSeen()
        self._steps = MeasuredSteps(every, model, by_optimizer=optimizer is not None)
        if planned is not None:
            self._steps.besides.add(planned.steps - 1)
        self._guard = Guard(_OFF, self._switch_off)
        introduced = Introduction(whole, lambda: self.sites, layout)
        self._models = WatchedModels(whole, introduced.stages)
        # What a probe batch shows is known after all other hooks of the step, too late for who needs maxima there.
        early = optimizer is not None and probe is None and dist.world() > 1
        gather = dist.StepGather.of(optimizer) if early and optimizer is not None else dist.StepGather()
        self._group = ProcessGroup(introduced, lambda: JOINED if any(map(joined, model.values())) else "", gather)
        self._journal = Journal(
            sinks,
            lambda: fitted(rules_for(setting.of(self.sites)) if rules is None else rules, self.model, self.sites),
            planned,
            lambda: {**about(self.model, self.sites, self.missed, optimizer, every), **self._group.about()},
        )
        self._arrivals = Arrivals(self._group, self._journal)
        self._step_end = StepEnd(self._steps, self._models, self._group, self._arrivals)
        self._end = TrainingEnd(self._steps, self._models, self._group, self._step_end, optimizer, guard=self._guard)
        for name, one in model.items():
            calls = CallStatistics(PassTokens(query_mask.get(name), classes.get(name)), setting, stats)
            due, rows = functools.partial(self._steps.due, name), None if stats is True else calls.rows
            tap = Tap(
                one,
                due=due,
                measure=calls.call,
                measure_rows=rows,
                measure_plain=calls.plain,
                keeps=True,
                guard=self._guard,
            )
            known = WatchedSites(name, tap.model, tap.sites, self._group, sites[name])
            changes = None if probe is None else LogitChanges(tap, probe)
            numbers = StepNumbers(self._steps, known, calls.tokens, changes, optimizer, guard=self._guard)
            self._models.add(name, tap, numbers, self._step_end.pass_over if optimizer is None else None)
        self._hooks: StepHooks | None = None
        if optimizer is None:
            self._group.records_alone = True
        else:
            before, after = (functools.partial(self._guard, f) for f in (self._step_end.before, self._after_step))
            self._hooks = StepHooks(before, after, optimizer)
            if early:
                self._hooks.come_first()
        super().__init__(functools.partial(self._guard, self._finish), state=self._state, load=self._load_state)

    @property
    def model(self) -> nn.Module:
        """The user's own module, inside the wrappers of torch.compile and DistributedDataParallel; of several models an
        nn.ModuleDict, in which the sites have their names."""
        return self._models.whole

    @property
    def sites(self) -> Sites:
        """The attention sites of the model, found in the first measured pass."""
        return self._models.sites

    @property
    def missed(self) -> tuple[Missed, ...]:
        """The attentions that were seen but not understood: they are not watched."""
        return self.sites.missed

    @property
    def compiled(self) -> bool:
        """Returns whether a pass that was seen ran compiled code."""
        return any(tap.compiled for tap in self._models.taps)

    @property
    def steps(self) -> int:
        """The number of optimizer steps done; set it to go on counting where an earlier training stopped."""
        return self._steps.done

    @steps.setter
    def steps(self, done: int) -> None:
        if done != self.steps and self._steps.step_due and self._models.has("train"):
            self._steps.besides.add(done)  # of a step that was skipped: what was measured counts for this one
        self._steps.done = done

    def measure_next(self) -> None:
        """Measures the step under way whatever the cadence says; call it before the step's first forward pass.

        For the last step of a training, or any that matters; where several processes train, all of them must.
        """
        self._steps.besides.add(self._steps.rounds("train") if self._hooks is None else self.steps)

    def measure_end(self) -> None:
        """Measures how a training ended whose last step nobody knew beforehand, as `close()` and the end of `with` do.

        To be called where the weights were changed since the last step, or for the numbers before watching ends.

        The model as it is after N steps is recorded at step N, by one more forward pass on the batch of the training
        pass seen last, in training mode; random streams and buffers are put back. Gradients are not read: there is no
        backward pass. Nothing is done where the last step was measured.

        Raises:
            RefusedError: several processes train, no optimizer was given or it is in the middle of a step, no training
                pass was seen, or the pass fails.
        """
        if self.active:
            self._end.measure()

    def training_over(self, tell: Callable[[str], None] = caution) -> None:
        """Measures the end as `close()` does. Where it can't, `tell` gets one sentence, with the step measured last:
        after an error, or where the weights are not those that the last step left."""
        if self.active:
            self._guard(self._end.measure_or_tell, tell)

    @property
    def closer(self) -> int | None:
        """Every so many steps are measured besides those of the cadence, alike on all processes; None for no others."""
        return self._steps.closer

    @closer.setter
    def closer(self, every: int | None) -> None:
        self._steps.closer = every

    def event(self, event: Mapping[str, object]) -> None:
        """Gives the sinks something else that happened, after the first sample; see `Sink.event`."""
        self._journal.event(event)

    @property
    def passes(self) -> int:
        """The number of forward passes that were seen, measured or not."""
        return self._steps.passed("train") + self._steps.passed("eval")

    @property
    def empty_passes(self) -> int:
        """The number of passes over an empty batch, of no sequences or no tokens: they are counted and not measured."""
        return sum(tap.empty for tap in self._models.taps)

    def read(self, phase: Phase | None = None) -> Stats:
        """Returns, by site name, the statistics of all passes measured since the last read, on the CPU.

        Training and eval passes are kept apart. Without a phase: the training passes', and where there were none, the
        eval passes'. Where several processes train, those of finished steps are over all of them.
        """
        self._settle()
        if phase is None:
            phase = "train" if self._arrivals.has("train") or self._models.has("train") else "eval"
        return merged([self._arrivals.take(phase), self._step_end.take(phase)])

    def include(self, *sites: AttentionSite) -> Self:
        """Watches sites that were described by hand too (`qkeel.sites.describe`); before the first pass.

        Raises: InvalidValueError if one was not described by hand, or passes have been seen already.
        """
        if any(site.description is None for site in sites) or self.passes:
            raise InvalidValueError(
                "expected sites from qkeel.sites.describe(model, name, ...) before the first forward pass; all others "
                "are found by themselves"
            )
        self._models.include(sites)
        return self

    @property
    def sample(self) -> Sample | None:
        """The numbers of the step measured last; None before the first."""
        self._settle()
        return self._journal.sample

    def sample_before(self, step: int) -> Sample | None:
        """The numbers of the training step measured last of those before `step`, which it waits for, but for no later
        one: what every process knows then, whatever has arrived besides. For steps from the one before the last on.
        """
        if self.active:
            self._guard(lambda: self._arrivals.settle(wait=False, before=step))
        return self._journal.before(step)

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms that were raised."""
        self._settle()
        return list(self._journal.log.alarms)

    @property
    def history(self) -> History:
        """The course of the run, for rules and plots; its `phase` says whether it is of training."""
        self._settle()
        return self._journal.history

    def table(self) -> str:
        """The numbers of the step measured last and the gravest alarms, one line per layer."""
        sample = self.sample
        return (
            "nothing measured yet"
            if sample is None
            else sample_table(sample, self.alarms, self._coverage, root=self._root)
        )

    def plot(self, what: str = "drift", *, field: str | None = None, ax: Foreign = None) -> Foreign:
        """Draws the course of the run by matplotlib and returns the Axes; see `History.plot`."""
        return self.history.plot(what, field=field, ax=ax)

    def __repr__(self) -> str:
        state = "" if self.active else ", closed"
        return (
            f"<Monitor of {type(self.model).__name__}: {len(self.sites)} attentions, {len(self.history):,} records, "
            f"{len(self.alarms)} alarms{state}>"
        )

    def _repr_html_(self) -> str:
        sample = self.sample
        return (
            "<p>nothing measured yet</p>"
            if sample is None
            else sample_html(sample, self.alarms, self._coverage, root=self._root)
        )

    @property
    def _root(self) -> str:
        return type(self.model).__name__

    @property
    def _coverage(self) -> str:
        return coverage(len(self.sites), [str(missed) for missed in self.missed])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(complete=exc[0] is None)

    def remove(self) -> None:
        """Stops watching, at once; the run counts as complete. Where several processes train, all of them must."""
        self._end.skip()
        self.close()

    def close(self, *, complete: bool = True) -> None:
        """Stops watching; `complete` says whether training ended as planned. Then its end is measured first, where the
        cadence has left it out, as by `measure_end`; one warning says so where it can't."""
        if self.active:
            self._journal.complete = complete
            try:
                if complete:
                    self._guard(self._end.measure_or_tell, caution)
            finally:
                super().remove()
        # What is left of the hooks says so to others that wait for this process, at the next measured step.
        if self._hooks is not None and not self._waited_for:
            self._guard(self._hooks.remove)  # again, where the first was in the middle of a step
        if self._end.hooks is not None:
            self._guard(self._end.hooks.remove)
        self._group.stopped = True

    def _state(self) -> State:
        """Steps done, the step measured last, the rate of the step done last (-1 for none); records and alarms."""
        self.sample_before(self.steps)  # it waits for the last record
        last, rate = self._steps.last, self._step_end.rate
        state = {"steps": torch.tensor(self.steps), "last": torch.tensor(-1 if last is None else last)}
        own = {**state, "rate": torch.tensor(-1.0, dtype=torch.float64) if rate is None else rate.cpu()}
        return own | {f"journal/{name}": value for name, value in self._journal.state().items()}

    def _load_state(self, state: State) -> None:
        self.steps = int(state["steps"])
        if int(state["last"]) >= 0:
            self._steps.measured(int(state["last"]))
        self._journal.load(under("journal/", state))
        self._step_end.rate = None if float(state["rate"]) < 0 else state["rate"].clone()

    def _finish(self) -> None:
        # One by one, so that where one fails the others are done all the same.
        for tap in self._models.taps:
            self._guard(tap.remove)
        if not self._group.stopped:
            self._guard(self._step_end.evaluated)
            self._guard(self._settle_all)
        if self._group.members is None:
            self._guard(self._leave)
        self._guard(self._look_for_others)
        self._guard(self._journal.close, self._guard.error is None)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._step_end.after(optimizer)
        if self._group.stopped:
            self._look_for_others()
            self.close(complete=False)

    def _settle(self) -> None:
        if self.active:
            self._guard(self._settle_all)

    def _settle_all(self) -> None:
        self._arrivals.settle(wait=True)

    def _look_for_others(self) -> None:
        self._waited_for = self._group.waited_for

    def _leave(self) -> None:
        self._group.leave(known=False)

    def _switch_off(self) -> None:
        """After a fault. Processes that wait for this one learn it at the next measured step."""
        self._group.stopped = True
        self.close(complete=False)


def watched(model: nn.Module) -> bool:
    """Returns whether a Monitor is on this model; a shallow copy of one that is shares its hooks, but is none."""
    taps = [tap for tap in owners(model) if isinstance(tap, Tap)]
    return any(isinstance(tap.visitor, StepNumbers) and tap.model is unwrapped(model) for tap in taps)
