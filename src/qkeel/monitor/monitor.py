"""The Monitor: measures the attention of a model while it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.functional.stats import LogitStats, merge
from qkeel.handle import Handle
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.monitor.about import about
from qkeel.monitor.alarms import DEFAULT
from qkeel.monitor.cadence import Cadence, Every
from qkeel.monitor.hidden import Hidden
from qkeel.monitor.history import History
from qkeel.monitor.journal import Journal
from qkeel.monitor.means import Means
from qkeel.monitor.moved import Moved
from qkeel.monitor.queries import QueryMask, with_query_mask
from qkeel.monitor.rule import Alarm, Rule
from qkeel.monitor.sample import Sample
from qkeel.monitor.sinks import Sink
from qkeel.monitor.table import sample_html, sample_table
from qkeel.monitor.transfer import Layout, Measured, Transfer, agree, say_off
from qkeel.monitor.weights import Weights
from qkeel.sites.find import find_sites
from qkeel.sites.forwards import owners
from qkeel.sites.intercept import Seen, statistics
from qkeel.sites.site import AttentionSite
from qkeel.sites.stack import tensors
from qkeel.sites.tap import Look, Phase, Tap, Visitor

Stats = dict[str, LogitStats]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a Monitor is to do; see `qkeel.watch`."""

    cadence: Cadence = dataclasses.field(default_factory=Every)
    sinks: tuple[Sink, ...] = ()
    rules: tuple[Rule, ...] = DEFAULT
    query_mask: QueryMask | None = None
    threshold: float = ALARM_THRESHOLD


@final
class Monitor(Handle):
    """Measures the attention of a model; made by `qkeel.watch`, undone by `remove()` or at the end of `with`.

    With an optimizer a step is one of its steps, numbered by the steps done before it: what is measured at step s is
    the model after s steps, over all the micro-batches that go into the next. Without one each training pass is a
    step. Passes in eval mode are kept apart.

    Nothing in here stops training: a fault warns once and switches the monitor off.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, plan: Plan) -> None:
        self.optimizer, self.plan = optimizer, plan
        self.steps = 0  # done so far
        self.sites: list[AttentionSite] = []  # known from the first pass on
        self._full = False  # whether this pass is measured in full
        self._last: dict[Phase, int | None] = {"train": None, "eval": None}
        self._mask: Tensor | None = None
        self._moved = Moved()
        self._means = Means()
        self._weights: Weights | None = None
        self._numbers: dict[tuple[str, str], Tensor] = {}
        self._hidden: Hidden | None = None
        self._taken: dict[Phase, list[Stats]] = {"train": [], "eval": []}  # read before their step was over
        self._unread: dict[Phase, Stats] = {"train": {}, "eval": {}}
        self._under_way: list[_Step] = []
        self._layout: Layout | None = None  # what all processes send
        self._refused: RefusedError | None = None
        self._broken = self._told = self._complete = False
        self._journal = Journal(plan.sinks, plan.rules, lambda: about(self.model, self.sites, optimizer, plan.cadence))
        self._tap = Tap(model, due=self._due, measure=self._measure, visitor=_Eyes(self), on_fault=self._off)
        self.model = self._tap.model
        self._hooks = []
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._safely(self._before_step)))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._safely(self._after_step)))
        super().__init__(self._stop)

    def read(self, phase: Phase | None = None) -> Stats:
        """Per site name, the statistics of all passes measured since the last read, on the CPU; starts anew.

        Training and eval passes are kept apart. Without a phase: the training passes', and where there were none, the
        eval passes'. Where several processes train, those of finished steps are over all of them.
        """
        self._settle(wait=True)
        if phase is None:
            phase = "train" if self._unread["train"] or self._tap.has("train") else "eval"
        recent = self._tap.read(phase)
        if recent:
            recent = dict(Transfer(Measured(stats=recent, numbers={}), alone=True).result().stats)
            self._taken[phase].append(recent)
        closed, self._unread[phase] = self._unread[phase], {}
        return merged([closed, recent])

    @property
    def sample(self) -> Sample | None:
        """The numbers of the step measured last; None before the first."""
        self._settle(wait=True)
        return self._journal.sample

    @property
    def alarms(self) -> list[Alarm]:
        """What was warned of."""
        self._settle(wait=True)
        return list(self._journal.log.alarms)

    @property
    def history(self) -> History:
        """The course of the run, for rules and plots."""
        self._settle(wait=True)
        return self._journal.recording.history

    def table(self) -> str:
        """The numbers of the step measured last and the gravest alarms, one line per layer."""
        return "nothing measured yet" if self.sample is None else sample_table(self.sample, self.alarms)

    def _repr_html_(self) -> str:
        return "<p>nothing measured yet</p>" if self.sample is None else sample_html(self.sample, self.alarms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(complete=exc[0] is None)

    def remove(self) -> None:
        """Stop watching; the run counts as complete."""
        self.close(complete=True)

    def close(self, *, complete: bool) -> None:
        """Stop watching; `complete` says whether training ended as planned."""
        self._complete = complete
        super().remove()

    # --- called by the tap -----------------------------------------------------------------------------------------

    def _due(self, training: bool, compiled: bool) -> Look:
        phase: Phase = "train" if training else "eval"
        now = self.steps if training and self.optimizer is not None else self._tap.passes[phase] - 1
        self._full = self.plan.cadence.due(now, self._last[phase], self._moved.factor if training else 1.0)
        if self._full:
            if not training:
                self._last["eval"] = now
            return "statistics"
        return "bracket" if self.plan.cadence.brackets and training and not compiled else "nothing"

    def _before_pass(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.plan.query_mask is not None:
            self._mask = self.plan.query_mask.of(args, kwargs)
        if self._hidden is None:
            self._discover(args, kwargs)

    def _discover(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Once: which sites there are, from one more forward pass."""
        try:
            self.sites = find_sites(self.model, *args, **kwargs)
        except RefusedError as error:
            self._refused = error  # told after the pass, if that shows nothing either
        except QkeelError as error:
            caution(f"the weights behind the heads can't be told, so they are not watched: {error}")
        if self.optimizer is not None:
            self._weights = Weights(self.model, self.sites, self.optimizer)
        self._hidden = Hidden(self.model, [site.name for site in self.sites], self._means)

    def _measure(self, call: Seen) -> LogitStats | None:
        return statistics(with_query_mask(call, self._mask), self.plan.threshold)

    def _after_pass(self, output: object, phase: Phase) -> None:
        if self._full and not self._tap.has(phase) and not any(self._taken[phase]):
            raise self._refused or RefusedError("no attention was seen in this forward pass")
        if phase == "train":
            losses = [x for x in tensors(output) if x.ndim == 0 and x.is_floating_point()]
            if len(losses) == 1:
                self._means.add(("", "train_loss"), losses[0].detach())
        if self.optimizer is None:
            self._close_step(phase, self._tap.passes[phase] - 1)

    # --- called by the optimizer -----------------------------------------------------------------------------------

    def _before_step(self) -> None:
        if not self._broken and self._weights is not None and self._step_due():
            self._numbers = self._weights.read()

    def _after_step(self) -> None:
        if self._step_due():
            if self._broken:
                self._take_part()
            elif self._tap.has("train") or any(self._taken["train"]):
                self._close_step("train", self.steps)
            elif not self._tap.passes["train"] and self._last["train"] is None:
                self._last["train"] = self.steps
                caution(_NOT_SEEN)
        self.steps += 1
        self._moved.step()
        if self._tap.has("eval"):
            self._close_step("eval", self.steps)
        self._settle(wait=False)

    def _step_due(self) -> bool:
        return self.plan.cadence.due(self.steps, self._last["train"], self._moved.factor)

    # --- a step's numbers ------------------------------------------------------------------------------------------

    def _close_step(self, phase: Phase, step: int) -> None:
        taken, fresh = self._taken[phase], self._tap.read(phase)
        self._taken[phase] = []
        numbers = {**self._numbers, **(self._means.read() if phase == "train" else {})}
        self._numbers = {}
        if self.optimizer is not None and phase == "train":
            rate = self.optimizer.param_groups[0]["lr"]
            numbers["", "lr"] = rate.detach() if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)
        measured = Measured(stats=merged([*taken, fresh]), numbers=numbers)
        together = phase == "train" and self.optimizer is not None and dist.world() > 1
        if together:
            self._agree(measured.layout())
        transfer = Transfer(measured, alone=not together)
        self._under_way.append(_Step(step=step, phase=phase, transfer=transfer, fresh=fresh if taken else None))
        if phase == "train":
            self._last["train"] = step
            self._moved.measured()
        self._settle(wait=False)

    def _agree(self, layout: Layout) -> None:
        """Make sure that all processes send alike before they do: a gather of unlike sizes never ends."""
        if self._layout is None and agree(layout):
            self._layout = layout
        elif self._layout != layout:
            if self._layout is not None:
                say_off(self._layout)
            self._told = True
            raise InvalidValueError("the processes of this run do not see the same attention, so nothing can be merged")

    def _settle(self, *, wait: bool) -> None:
        """Put on record what has arrived."""
        while self._under_way and (wait or self._under_way[0].transfer.arrived):
            done = self._under_way.pop(0)
            measured = done.transfer.result()
            if done.fresh != {}:
                self._unread[done.phase] = merged([self._unread[done.phase], done.fresh or measured.stats])
            self._journal.add(done.step, done.phase, measured)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._off(error)

    def _off(self, error: Exception) -> None:
        if self._broken or not self.active:
            return
        self._broken = True
        caution(
            f"qkeel's monitor switched itself off: {_words(error)}. The model runs on unwatched; what was recorded "
            "is kept"
        )
        if self.optimizer is None or dist.world() == 1 or self._told:
            self.close(complete=False)
        else:
            self._tap.remove()  # the others wait for this process at the next step that is measured: _take_part

    def _take_part(self) -> None:
        """Tell the other processes that this one has switched itself off; they do the same."""
        agree(None) if self._layout is None else say_off(self._layout)
        self.close(complete=False)

    def _stop(self) -> None:
        self._tap.remove()
        for hook in self._hooks:
            hook.remove()
        try:
            if not self._broken:
                if self._tap.has("eval"):
                    self._close_step("eval", self.steps)
                self._settle(wait=True)
        except Exception as error:
            caution(f"the last numbers of qkeel's monitor are lost: {_words(error)}")
        self._journal.close(self._complete)


class _Eyes(Visitor):
    """The monitor's end of its tap."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.phase: Phase = "train"

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.phase = "train" if self.monitor.model.training else "eval"
        self.monitor._before_pass(args, kwargs)

    def looking(self) -> Handle | None:
        return None if self.monitor._hidden is None or self.phase == "eval" else self.monitor._hidden.attach()

    def after(self, output: object) -> None:
        self.monitor._after_pass(output, self.phase)

    def bracket(self, bound: Tensor) -> None:
        self.monitor._moved.see(bound)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step whose numbers are under way; `fresh` are those nobody has read, where some were."""

    step: int
    phase: Phase
    transfer: Transfer
    fresh: Stats | None


def merged(parts: Iterable[Mapping[str, LogitStats]]) -> Stats:
    """Statistics by site, those of one site merged."""
    found: Stats = {}
    for part in parts:
        for name, stats in part.items():
            found[name] = merge(found[name], stats) if name in found else stats
    return found


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, QkeelError) else f"{type(error).__name__}: {error}"


def watched(model: nn.Module) -> bool:
    """Whether a Monitor is on this model."""
    return any(isinstance(tap, Tap) and isinstance(tap.visitor, _Eyes) for tap in owners(model))


_NOT_SEEN = (
    "the optimizer stepped, but no forward pass of the watched model was seen. Call the model itself, model(...), not "
    "model.forward(...) nor one of its parts; where a compiled function calls it, give torch.compile the model instead"
)
