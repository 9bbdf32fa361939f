"""The Monitor: measures the attention of a model while it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, final

from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.handle import Handle
from qkeel.monitor.about import about
from qkeel.monitor.changes import Changes
from qkeel.monitor.classes import Tokens
from qkeel.monitor.gains import Gains
from qkeel.monitor.hidden import Hidden
from qkeel.monitor.history import History
from qkeel.monitor.journal import Journal
from qkeel.monitor.means import Means
from qkeel.monitor.measuring import Measuring
from qkeel.monitor.moved import Moved
from qkeel.monitor.plan import Plan
from qkeel.monitor.rule import Alarm, Rule
from qkeel.monitor.sample import Sample
from qkeel.monitor.setup_rules import rules_for
from qkeel.monitor.steps import NOT_SEEN, Steps
from qkeel.monitor.table import sample_html, sample_table
from qkeel.monitor.together import Together
from qkeel.monitor.transfer import Flag, Measured, Stats, Transfer, merged, on_host
from qkeel.monitor.weights import Weights
from qkeel.sites.find import find_sites
from qkeel.sites.forwards import owners, unwrapped
from qkeel.sites.site import AttentionSite
from qkeel.sites.stack import tensors
from qkeel.sites.tap import Look, Phase, Tap, Visitor


@final
class Monitor(Handle):
    """Measures the attention of a model; made by `qkeel.watch`, undone by `remove()` or at the end of `with`.

    With an optimizer a step is one of its steps, numbered by the steps done before it: what is measured at step s is
    the model after s steps, over all the micro-batches that go into the next. Without one each training pass is a
    step. Passes in eval mode are kept apart. A fault in here warns once and switches the monitor off.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, plan: Plan) -> None:
        self.optimizer, self.plan = optimizer, plan
        self.steps = 0  # done so far
        self.sites: list[AttentionSite] = []  # known from the first pass on
        self._last: dict[Phase, int | None] = {"train": None, "eval": None}
        self._tokens = Tokens(plan.query_mask, plan.classes)
        self._moved = Moved()
        self._means = Means()
        self._measuring = Measuring(self._tokens, plan.threshold)
        self._weights: Weights | None = None
        self._gains: Gains | None = None
        self._numbers: dict[tuple[str, str], Tensor] = {}
        self._hidden: Hidden | None = None
        self._taken: dict[Phase, list[Stats]] = {"train": [], "eval": []}  # read before their step was over
        self._unread: dict[Phase, Stats] = {"train": {}, "eval": {}}
        self._under_way: list[_Step] = []
        self._together = Together()
        self._untold: QkeelError | None = None  # why the sites are not known
        self._broken = self._warned = self._complete = False
        self._journal = Journal(
            plan.sinks, self._rules, plan.planned, lambda: about(self.model, self.sites, optimizer, plan.cadence)
        )
        measure, rows = self._measuring.call, None if plan.stats is True else self._measuring.rows
        eyes = _Eyes(self)
        self._tap = Tap(model, due=self._due, measure=measure, measure_rows=rows, visitor=eyes, on_fault=self._off)
        self.model = self._tap.model
        self._changes = None if plan.probe is None else Changes(self._tap, plan.probe)
        self._steps: Steps | None = None
        if optimizer is not None:
            self._steps = Steps(optimizer, self._guard(self._before_step), self._guard(self._after_step))
        super().__init__(self._stop)

    def read(self, phase: Phase | None = None) -> Stats:
        """Per site name, the statistics of all passes measured since the last read, on the CPU; starts anew.

        Training and eval passes are kept apart. Without a phase: the training passes', and where there were none, the
        eval passes'. Where several processes train, those of finished steps are over all of them.
        """
        self._settled()
        if phase is None:
            phase = "train" if self._unread["train"] or self._tap.has("train") else "eval"
        recent = on_host(self._tap.read(phase))
        if recent:
            self._taken[phase].append(recent)
        closed, self._unread[phase] = self._unread[phase], {}
        return merged([closed, recent])

    @property
    def passes(self) -> int:
        """How many forward passes of the model were seen, measured or not."""
        return sum(self._tap.passes.values())

    def include(self, *sites: AttentionSite) -> Self:
        """Watch sites that were described by hand too (`qkeel.sites.describe`); before the first pass.

        Raises: InvalidValueError if one was not described by hand, or passes have been seen already.
        """
        if any(site.description is None for site in sites) or self._hidden is not None:
            raise InvalidValueError(
                "expected sites from qkeel.sites.describe(model, name, ...) before the first forward pass; all others "
                "are found by themselves"
            )
        self._tap.described += sites
        return self

    @property
    def sample(self) -> Sample | None:
        """The numbers of the step measured last; None before the first."""
        self._settled()
        return self._journal.sample

    @property
    def alarms(self) -> list[Alarm]:
        """What was warned of."""
        self._settled()
        return list(self._journal.log.alarms)

    @property
    def history(self) -> History:
        """The course of the run, for rules and plots."""
        self._settled()
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
        """Stop watching; the run counts as complete. Where several processes train, all of them must."""
        self.close(complete=True)

    def close(self, *, complete: bool) -> None:
        """Stop watching; `complete` says whether training ended as planned."""
        self._complete = complete
        super().remove()
        if self._steps is not None:
            self._steps.remove()  # again, where the first was in the middle of a step

    # --- called by the tap -----------------------------------------------------------------------------------------

    def _due(self, training: bool, compiled: bool) -> Look:
        phase: Phase = "train" if training else "eval"
        now = self.steps if training and self.optimizer is not None else self._tap.passes[phase] - 1
        if self.plan.cadence.due(now, self._last[phase], self._moved.factor if training else 1.0):
            if not training:
                self._last["eval"] = now
            return "statistics"
        return "bracket" if self.plan.cadence.brackets and training and not compiled else "nothing"

    def _before_pass(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._means.begin()
        self._tokens.begin(args, kwargs)
        if self._hidden is None:
            self._discover(args, kwargs)

    def _discover(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Once: which sites there are, from one more forward pass."""
        self._hidden = Hidden(self.model, (), self._means, self._tap.fault)
        if dist.splits_heads(self.model):
            self._together.stay_alone("the heads of this model are split over processes, as by tensor parallelism")
            return
        try:
            self.sites = find_sites(self.model, *args, **kwargs)
        except QkeelError as error:
            self._untold = error  # told after the pass, if that goes through
        if dist.sharded(self.model) and self.sites and not any(site.terms for site in self.sites):
            caution(
                "the weights behind the heads can't be told in a model that fully_shard has split, so they are not "
                "watched; the logits are"
            )
        named = {site.name for site in self._tap.described}
        self.sites = [*self._tap.described, *(site for site in self.sites if site.name not in named)]
        self._tap.dispatch = any(site.below for site in self.sites)
        if self.optimizer is not None:
            self._weights = Weights(self.model, self.sites, self.optimizer)
            self._gains = Gains(self.model, self.sites)
        self._hidden = Hidden(self.model, [site.name for site in self.sites], self._means, self._tap.fault)

    def _rules(self) -> tuple[Rule, ...]:
        given = self.plan.rules
        return given if given is not None else rules_for(self._measuring.observed.setting(self.sites))

    def _after_pass(self, output: object, phase: Phase) -> None:
        self._tokens.end()
        seen = self._tap.has(phase) or any(self._taken[phase])
        untold, self._untold = self._untold, None
        if not seen and not self._journal.sites and (untold is not None or not self.sites):
            raise untold or RefusedError("no attention was seen in this forward pass")
        if untold is not None:
            caution(f"the weights behind the heads can't be told, so they are not watched: {untold}")
        if phase == "train":
            losses = [x for x in tensors(output) if x.ndim == 0 and x.is_floating_point()]
            if len(losses) == 1:
                self._means.add(("", "train_loss"), losses[0].detach())
        if self.optimizer is None and seen:
            self._close_step(phase, self._tap.passes[phase] - 1)

    def _pass_failed(self) -> None:
        self._means.drop()
        if self._untold is not None:
            self._untold = self._hidden = None  # the fault was the pass's: try again with the next

    def _bracketed(self, bound: Tensor) -> None:
        self._moved.see(bound)
        if self.optimizer is None:
            self._moved.step()

    # --- called by the optimizer -----------------------------------------------------------------------------------

    def _before_step(self) -> None:
        # One that has switched itself off reads too: sharded weights are gathered, and the others would wait for it.
        if not self._step_due():
            return
        if self._changes is not None and self._tap.active:
            self._changes.before()
        if self._weights is not None and self._gains is not None:
            self._numbers = {**self._weights.read(), **self._gains.read()}
            scale = None if self._steps is None else self._steps.gradient_scale
            if scale is not None:
                self._numbers = {k: x / scale if "grad" in k[1] else x for k, x in self._numbers.items()}

    def _after_step(self) -> None:
        steps = self._steps
        if steps is None or steps.skipped:
            return  # what was measured counts for the next
        if not self._broken and (self._tap.has("eval") or self._taken["eval"]):
            self._close_step("eval", self.steps)
        if self._step_due():
            self._end_step()
        self.steps += 1
        steps.taken()
        self._moved.step()
        self._settle(wait=False)

    def _end_step(self) -> None:
        if self._broken:
            self._take_part()
            return
        if not self._tap.passes["train"] and not self._warned:
            self._warned = True
            caution(NOT_SEEN)
        if self._changes is not None and self._tap.has("train"):
            self._numbers |= self._changes.after()
        self._close_step("train", self.steps)

    def _step_due(self) -> bool:
        return self.plan.cadence.due(self.steps, self._last["train"], self._moved.factor)

    # --- a step's numbers ------------------------------------------------------------------------------------------

    def _close_step(self, phase: Phase, step: int) -> None:
        taken, fresh = self._taken[phase], self._tap.read(phase)
        self._taken[phase] = []
        if taken:
            fresh = on_host(fresh)
        measured = self._measured(phase, merged([*taken, fresh]))
        if phase == "eval" or self.optimizer is None:
            transfer = None if measured is None else Transfer.of(measured, alone=True)
        else:
            self._settle(wait=self._together.several)  # who has stopped takes part in no further gather
            transfer = self._together.send(step, measured)
        if transfer is not None:
            self._under_way.append(_Step(step=step, phase=phase, transfer=transfer, fresh=fresh if taken else None))
        if phase == "train" and transfer is not None:
            self._last["train"] = step
            self._moved.measured()
        self._settle(wait=False)

    def _measured(self, phase: Phase, stats: Stats) -> Measured | None:
        """The step's numbers, with those of the whole model; None where no attention was seen."""
        numbers = {**self._numbers, **self._means.read()} if phase == "train" else {}
        if phase == "train":
            self._numbers = {}
            if self._steps is not None:
                numbers["", "lr"] = self._steps.rate
        return Measured(stats=stats, numbers=numbers) if stats else None

    def _settled(self) -> None:
        self._guard(lambda: self._settle(wait=True))()

    def _settle(self, *, wait: bool) -> None:
        """Put on record what has arrived."""
        while self._under_way and (wait or self._under_way[0].transfer.arrived):
            done = self._under_way.pop(0)
            if done.transfer.flagged(Flag.OFF):
                self._together.over = True
            measured = done.transfer.result()
            if done.fresh != {}:
                self._unread[done.phase] = merged([self._unread[done.phase], done.fresh or measured.stats])
            if measured.stats:
                self._journal.add(done.step, done.phase, measured)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _guard(self, act: Callable[[], None]) -> Callable[[], None]:
        def safely() -> None:
            try:
                if self.active:
                    act()
            except Exception as error:
                self._off(error)

        return safely

    def _off(self, error: Exception) -> None:
        if self._broken or not self.active:
            return
        self._broken = True
        caution(
            f"qkeel's monitor switched itself off: {_words(error)}. The model runs on unwatched; what was recorded "
            "is kept"
        )
        if self.optimizer is None or not self._together.several:
            self.close(complete=False)
        else:
            self._tap.remove()  # the others wait for this process at the next step that is measured: _take_part

    def _take_part(self) -> None:
        """Tell the other processes that this one has switched itself off, unless one of them was first."""
        if not any(s.transfer.flagged(Flag.OFF) for s in self._under_way):
            self._together.leave(self.steps)
        self.close(complete=False)

    def _stop(self) -> None:
        self._tap.remove()
        try:
            if not self._broken:
                if self._tap.has("eval") or self._taken["eval"]:
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

    def failed(self) -> None:
        self.monitor._pass_failed()

    def bracket(self, bound: Tensor) -> None:
        self.monitor._bracketed(bound)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step whose numbers are under way; `fresh` are those nobody has read, where some were."""

    step: int
    phase: Phase
    transfer: Transfer
    fresh: Stats | None


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, QkeelError) else f"{type(error).__name__}: {error}"


def watched(model: nn.Module) -> bool:
    """Whether a Monitor is on this model; a shallow copy of one that is shares its hooks, but is none."""
    taps = [tap for tap in owners(model) if isinstance(tap, Tap)]
    return any(isinstance(tap.visitor, _Eyes) and tap.model is unwrapped(model) for tap in taps)
