"""The watched models of a run, and the end of a step, which passes its numbers on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.calls import SiteStatistics
from qkeel.capture.visible_sets import LayerType
from qkeel.errors import caution
from qkeel.monitor.cadence import MeasuredSteps
from qkeel.monitor.gather import on_host
from qkeel.monitor.journal import PendingStep, Recorder
from qkeel.monitor.measure import StepNumbers
from qkeel.monitor.numbers import Number, NumberKey, Stats
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.record import Sample
from qkeel.patching.modes import FaultGuard
from qkeel.patching.roles import Phase
from qkeel.sites.find import all_sites, within
from qkeel.sites.site import AttentionSite, Sites
from qkeel.sites.tap import Tap

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
class WatchedModels:
    """The models of a run, and the end of its steps: reads the statistics of a step from the taps, adds the other
    numbers of the step, and sends everything on.

    Usually there is one model, whose name is "". Of several, the names of sites begin with the name of the model, and
    a number of the whole model, such as the loss, is that of the last model that has it.

    Attributes:
        whole: the model, or a module that contains all models.
        rate: the learning rate of the last step done.
        loss: the loss of the coming step, if the training program hands it out.
    """

    def __init__(
        self,
        whole: nn.Module,
        steps: MeasuredSteps,
        group: ProcessGroup,
        recorder: Recorder,
        guard: FaultGuard,
    ) -> None:
        self.whole = whole
        self._steps, self._group = steps, group
        self._recorder, self._guard = recorder, guard
        self._models: dict[str, StepNumbers] = {}
        self._passed: dict[Phase, set[str]] = {"train": set(), "eval": set()}
        # The latest of which the cadence knows.
        self._noted: Sample | None = None
        # What has been sent of the monitor's own counts.
        self._calls: dict[Phase, float] = {"train": 0, "eval": 0}
        self._seconds = 0.0
        # What was read before the end of its step.
        self._taken: dict[Phase, list[Stats]] = {"train": [], "eval": []}
        self.rate: float | Tensor | None = None
        self.loss: Tensor | None = None
        self._is_warned = False

    def add(self, numbers: StepNumbers, *, by_step: bool) -> None:
        """Adds a model. Without an optimizer, not `by_step`, a step is over once every model has run, in any order."""
        self._models[numbers.name] = numbers.tap.visitor = numbers

        def role_known(phase: Phase, measured: bool) -> None:
            self._steps.counted(numbers.name, phase)
            if measured and not by_step:
                self._passed[phase].add(numbers.name)
                if len(self._passed[phase]) == len(self._models) and self.has(phase):
                    self._passed[phase].clear()
                    self._close(phase, self._steps.rounds(phase) - 1, None, alone=True)
                    self._note_top()

        numbers.role_known = role_known

    @property
    def taps(self) -> list[Tap]:
        """The tap of each model."""
        return [numbers.tap for numbers in self._in_order()]

    def _in_order(self) -> list[StepNumbers]:
        # Processes must send their numbers in the same order, whatever order the models are given in.
        stages = self._group.stages
        return sorted(self._models.values(), key=lambda x: stages.get(x.name) or 0)

    @property
    def sites(self) -> Sites:
        """The sites of all models."""
        return all_sites({x.name: x.tap.sites for x in self._in_order()})

    def include(self, sites: Sequence[AttentionSite]) -> None:
        """Adds sites that were described by hand, each to the model that contains it."""
        for site in sites:
            holders = [t for t in self.taps if site.module in t.model.modules()]
            (holders or self.taps)[0].sites.append(site)

    @property
    def types(self) -> Mapping[str, LayerType]:
        """The types of the observed layers of all models."""
        if "" in self._models:
            # The same object while nothing changes, by which a change is noticed.
            return self._models[""].sites.types
        types: dict[str, LayerType] = {}
        for name, numbers in self._models.items():
            types |= {within(name, site): x for site, x in numbers.sites.types.items()}
        return types

    @property
    def weights_not_finite(self) -> tuple[str, ...]:
        """The weights that had NaN or infinity before the first pass."""
        return tuple(
            within(numbers.name, weight)
            for numbers in self._in_order()
            for weight in numbers.weights_not_finite
        )

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of the current step to read."""
        return any([tap.has(phase) for tap in self.taps])

    def take(self, phase: Phase) -> Stats:
        """Returns the statistics of the current step so far, on the CPU; they remain part of that step's statistics.

        A step that several processes measure together has none before its end.
        """
        if phase == "train" and self._group.records_jointly:
            return {}
        recent = on_host(self._merged(lambda tap: tap.take(phase)))
        if recent:
            self._taken[phase].append(recent)
        return recent

    def peek(self, phase: Phase | None) -> Stats:
        """Returns the statistics of passes whose role is open, taken for trained if the model was in training mode, on
        the CPU."""
        return on_host(self._merged(lambda tap: tap.peek(phase)))

    def _merged(self, read: Callable[[Tap], Stats]) -> Stats:
        if "" in self._models:
            return read(self._models[""].tap)
        return SiteStatistics(
            [
                {within(x.name, site): of_site for site, of_site in read(x.tap).items()}
                for x in self._in_order()
            ]
        )

    def settle(self, *, decide: bool) -> None:
        """Sorts the passes whose role is known, or, to `decide`, all passes; see `Tap.settle`."""
        for tap in self.taps:
            tap.settle(decide=decide)

    def before(self, optimizer: Optimizer) -> None:
        """Must be called before each optimizer step; reads weights and gradients."""
        # What no gradient has reached by now, none will: the step changes the weights.
        self.settle(decide=True)
        if self._steps.step_due and not self._group.stopped:
            # The factor by which the gradients are still multiplied, because GradScaler lets a fused optimizer unscale.
            scale = vars(optimizer).get("grad_scale")
            for numbers in self._models.values():
                numbers.before_step(scale if isinstance(scale, Tensor) else None)

    def after(self, optimizer: Optimizer) -> None:
        """Must be called after each optimizer step. What was measured for a skipped step counts towards the next
        step."""
        # The passes in a closure that the step has called again.
        self.settle(decide=True)
        # GradScaler calls a fused optimizer even for a step that it skips.
        infinite = vars(optimizer).get("found_inf")
        if isinstance(infinite, Tensor) and bool(infinite.any()):
            return
        try:
            self.evaluated()
            rate = optimizer.param_groups[0]["lr"]
            rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
            if self._steps.step_due:
                self._warn_without_passes()
                for numbers in self._models.values() if self.has("train") else ():
                    numbers.after_step()
                # The weights that this step's forward passes used are the result of the previous step.
                of_weights = rate if self.rate is None else self.rate
                self._close("train", self._steps.done, of_weights, alone=False)
            self.rate = rate
        finally:
            self.loss = None
            self._steps.stepped()
        self._recorder.settle(wait=False)
        self._note_top()

    def _note_top(self) -> None:
        """Tells the cadence the latest largest logit."""
        sample = self._recorder.before(sys.maxsize)
        if sample is not None and sample is not self._noted:
            self._noted = sample
            self._steps.recorded(sample.step, sample.overall("max_logit"))

    def evaluated(self) -> None:
        """Ends the evaluation passes since the last step, if there were any."""
        if self.has("eval") or self._taken["eval"]:
            self._close("eval", self._steps.done, None, alone=True)

    def _warn_without_passes(self) -> None:
        if not self._steps.passed("train") and not self._is_warned:
            self._is_warned = True
            # Passes that were seen but not trained have another cause than passes that were not seen.
            n_untrained = self._steps.passed("eval")
            caution(NOT_TRAINED.format(n_untrained) if n_untrained else NOT_SEEN)

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
            if self.loss is not None:
                numbers["", "train_loss"] = Number(self.loss, 1)
        if not alone:
            # A process that has stopped joins no exchange.
            self._recorder.settle(wait=self._group.several)
        counts = self._counts(phase, stats)
        transfer = self._group.send(stats, numbers, counts, alone=alone)
        if transfer is not None:
            self._calls[phase] += counts["calls"]
            self._seconds += counts.get("milliseconds", 0.0) / 1000
            # `read` has handed out the rest of this step already.
            unread = fresh if taken else None
            self._recorder.expect(PendingStep(step, phase, transfer, counts, unread))
            if phase == "train":
                self._steps.measured(step)
        self._recorder.settle(wait=False)

    def _counts(self, phase: Phase, stats: Stats) -> dict[str, float]:
        """How much of the models these statistics cover, and the monitor's own work since the previous measured step,
        keyed by the names in records.MONITOR_FIELDS."""
        models = [*self._models.values()]
        names = [
            within(x.name, site.name) if x.name else site.name
            for x in models
            for site in x.tap.sites
        ]
        calls = sum([x.tap.calls_seen[phase] for x in models])
        counts = {
            "sites": len(names),
            "calls": calls - self._calls[phase],
            "missed": sum([len(x.tap.sites.missed) for x in models]),
            "silent": len(set(names).difference(stats)),
            "errors": sum([x.sites.errors for x in models]) + self._recorder.dropped,
        }
        # Of passes beside a step that is also trained, its record has the time of all.
        if phase == "train" or not self.has("train"):
            counts["milliseconds"] = 1000 * (self._guard.seconds - self._seconds)
        return counts

    def warn_without_steps(self) -> None:
        """Must be called at the end of training: warns if passes were trained, but no step was seen."""
        self.settle(decide=True)
        if not self._steps.done and self.has("train") and dist.rank() == 0:
            caution(NO_STEP)


def as_tensor(rate: float | Tensor) -> Tensor:
    """A learning rate as a tensor, which most steps do not need."""
    if isinstance(rate, Tensor):
        return rate
    return torch.scalar_tensor(rate, dtype=torch.float64)
