"""The training step, run by run with torch's operators, or for a stack of runs with torch's or compiled operators.

Shapes: runs in a stack, b sequences per run, t tokens, h heads; [runs ...] is a parameter of all runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from qkeel.capture.calls import Seen, statistics
from qkeel.errors import RefusedError, ShapeError
from qkeel.functional.class_statistics import TokenClasses
from qkeel.functional.logits import z_loss
from qkeel.functional.statistics import TENSORS, LogitStats
from qkeel.kernels.native import operators
from qkeel.lab.build_run import RATE, autocast, learning_rate
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import RunConfig
from qkeel.lab.run_record import (
    ProbeStatistics,
    heldout_numbers,
    mean_change,
    measuring,
    probe,
    remembered,
    summed_up,
    token_loss,
)
from qkeel.lab.stack_models import Report, StackedAttention, small, stack_models, why_not_stacked
from qkeel.lab.tasks import Examples
from qkeel.monitor.measure import change_between, frozen
from qkeel.nn.attention import SpecModule
from qkeel.patching import optimizers as adam_groups
from qkeel.patching.modes import multiply_all
from qkeel.spec import AttentionCall

# The reference backend, followed by faster backends and the choice between them.


class TrainingBackend:
    """Computes the training steps of runs that differ only in seed, steps, rates and decay, and measures their models.

    This class uses torch's operators, one run after the other, and is the reference for every other backend. A step
    calls the first three methods in order, and the backend stores the gradients between these calls. `reason` says why
    no faster backend can train these runs; it is empty for the fastest backend.
    """

    def __init__(self, runs: Sequence[RunState], reason: str = "") -> None:
        self.runs, self.reason = runs, reason
        self.parameters = [list(run.model.parameters()) for run in runs]
        self._before: list[list[Seen]] = [[] for _ in runs]

    def losses_and_gradients(self, batches: Sequence[Examples], seeds: Sequence[int]) -> Tensor:
        """Returns the loss of each run on its batch [runs]; `seeds` are used for random numbers in the forward pass."""
        return torch.stack([_loss(*each) for each in zip(self.runs, batches, seeds, strict=True)])

    def clip(self, limit: float) -> Tensor:
        """Clips gradients to the norm `limit` (0 disables clipping); returns each run's norm before clipping [runs]."""
        norms = []
        for run, parameters in zip(self.runs, self.parameters):
            there = [p for p in parameters if p.grad is not None]
            if run.loss_scale is not None:
                multiply_all([p.grad for p in there if p.grad is not None], 1 / run.loss_scale.value)
            norms.append(get_total_norm([p.grad for p in there if p.grad is not None], foreach=True))
            if limit:
                clip_grads_with_norm_(there, limit, norms[-1], foreach=True)
            if run.loss_scale is not None:
                run.loss_scale.see(norms[-1])
        return torch.stack(norms)

    def optimizer_step(self) -> None:
        """Takes a step with each run's optimizer, including the hooks of remedies, and clears the gradients."""
        for run in self.runs:
            if run.loss_scale is None or not run.loss_scale.skips:
                run.optimizer.step()
            run.optimizer.zero_grad()
            if run.loss_scale is not None:
                run.loss_scale.update()

    def remember(self) -> None:
        """Stores the logits of each run on its probe, so that the next `probe` can measure how much they change."""
        self._before = []
        for run in self.runs:
            with autocast(run.config):
                self._before.append(remembered(run.model, run.probed.inputs))

    def probe(self) -> list[ProbeStatistics]:
        """Returns the attention statistics of each run on its probe."""
        before, self._before = self._before, [[] for _ in self.runs]
        return [_probe(*each) for each in zip(self.runs, before)]

    def evaluate(self) -> list[dict[str, float]]:
        """Returns the held-out losses of each run, with NaN for values that are not finite."""
        return [_evaluate(run) for run in self.runs]


def _loss(run: RunState, batch: Examples, seed: int) -> Tensor:
    """Returns the loss of a batch and adds its gradient to the parameters."""
    config = run.config
    torch.manual_seed(seed)
    parts = batch.split(config.data.batch // config.accumulate)
    return torch.stack([_backward(run, part, config) for part in parts]).sum()


def _backward(run: RunState, examples: Examples, config: RunConfig) -> Tensor:
    """Returns one part's share of the batch loss and adds its gradient to the parameters."""
    with autocast(config):
        logits = run.model(examples.inputs)
    loss = token_loss(logits, examples.targets)
    total = loss + z_loss(logits, config.optim.z_loss) if config.optim.z_loss else loss
    scaled = total if run.loss_scale is None else total * run.loss_scale.value
    (scaled / config.accumulate).backward()
    return loss.detach() / config.accumulate


def _probe(run: RunState, before: Sequence[Seen]) -> ProbeStatistics:
    inputs, task, classes = run.probed.inputs, run.task, None
    if task.classes:
        of = task.input_classes(inputs)
        classes = TokenClasses(names=tuple(task.classes), query=of, key=of)
    with autocast(run.config):
        return probe(run.model, inputs, classes, before)


def _evaluate(run: RunState) -> dict[str, float]:
    with autocast(run.config):
        found = heldout_numbers(run.model, run.heldout, 4 * run.config.data.batch, run.task)
    return {name: value if math.isfinite(value) else math.nan for name, value in found.items()}


# Every run takes the following step, whether alone or in a stack, and on a CPU or a GPU.


def train_step(arithmetic: TrainingBackend, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Takes one training step; returns each run's loss [runs] and the norm of its gradient before clipping [runs].

    This function does not wait for the device, except for loss scaling with fp16.

    Args:
        arithmetic: the backend for runs that differ only in seed, steps, rates and decay.
        steps: the number of steps that each run has completed.
    """
    runs = arithmetic.runs
    for run, step in zip(runs, steps, strict=True):
        set_rate(run, step)
    batches = read_batches(runs, steps)
    # Random numbers for dropout are a function of (seed, step), like the batch.
    losses = arithmetic.losses_and_gradients(batches, [r.config.seed * 1_000_003 + s for r, s in zip(runs, steps)])
    norms = arithmetic.clip(runs[0].config.optim.grad_clip)
    arithmetic.optimizer_step()
    return losses, norms


def set_rate(run: RunState, step: int) -> None:
    """Sets the learning rate of a step for all parameter groups of the run's optimizer."""
    rate = learning_rate(run.config.optim, step, run.config.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get(RATE, 1.0)


def read_batches(runs: Sequence[RunState], steps: Sequence[int]) -> list[Examples]:
    """Returns the examples of each run's step, on its device; runs with equal seeds and steps share their examples."""
    keys = [(run.config.seed, step) for run, step in zip(runs, steps)]
    read = {key: runs[0].task.batch(*key).to(runs[0].device) for key in dict.fromkeys(keys)}
    return [read[key] for key in keys]


# Clipping and one AdamW pass over the weights of all runs, where each run has its own learning rate.

_STATE = frozenset(("step", "exp_avg", "exp_avg_sq"))
_NOT_STEPPED = -1.0  # this rate tells the kernel to skip a weight

StackParameters = Sequence[nn.Parameter]


@final
class StackedAdamW:
    """Takes the AdamW steps of many runs at once, with the hooks of each run and the state of each optimizer.

    A hook may itself take the step of some weights, as `lalr` does with `remedies.steps.fused_adam`; this pass then
    skips these weights.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], stacked: StackParameters, own: Sequence[StackParameters]
    ) -> None:
        self._optimizers, self._weights, self._own = optimizers, [p.detach() for p in stacked], own
        groups = optimizers[0].param_groups
        self._group = _places(optimizers[0], own[0])
        self._decays = [[o.param_groups[g]["weight_decay"] for o in optimizers] for g in self._group]
        beta1, beta2 = groups[0]["betas"]
        self._options: tuple[float, float, float] = (beta1, beta2, groups[0]["eps"])
        self._gradients: dict[int, Tensor] = {}
        self._take_state()

    @classmethod
    def of(
        cls, optimizers: Sequence[Optimizer], stacked: StackParameters, own: Sequence[StackParameters]
    ) -> Self | None:
        """Returns the joint step of these optimizers, or None unless all are torch's fused AdamW with equal options.

        Learning rates and weight decays may differ.

        Args:
            optimizers: one optimizer per run.
            stacked: the weights [runs ...].
            own: for each optimizer, its parts of these weights.
        """
        if adam_groups.every_optimizer_has_hooks() or not all(map(_fits, optimizers, own)):
            return None
        alike = all(_about(o, table) == _about(optimizers[0], own[0]) for o, table in zip(optimizers, own))
        return cls(optimizers, stacked, own) if alike else None

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Stores the gradients [runs ...], one per weight."""
        self._gradients = {i: g.contiguous() for i, g in enumerate(gradients) if g is not None}

    def clip(self, limit: float) -> Tensor:
        """Clips each run's gradients to the norm `limit` (0 disables clipping); returns the norms [runs] before
        clipping."""
        return operators.clip_(list(self._gradients.values()), limit)

    @torch.no_grad()
    def step(self) -> None:
        """Takes the step of each run, calls its hooks, and clears the gradients."""
        there, gradients = list(self._gradients), list(self._gradients.values())
        parts = [g.unbind() for g in gradients]
        rates = [self._rates(r, there, [part[r] for part in parts]) for r in range(len(self._own))]
        weights, means, variances = ([x[i] for i in there] for x in (self._weights, self._means, self._variances))
        done = self._done if len(there) == len(self._weights) else self._done[there]
        table = torch.tensor(rates, dtype=torch.float64).T.contiguous()
        decays = [decay for i in there for decay in self._decays[i]]
        operators.adamw_(weights, gradients, (means, variances, done), table, (decays, *self._options))
        if done is not self._done:
            self._done[there] = done
        for optimizer, own in zip(self._optimizers, self._own):
            adam_groups.call_hooks_after(optimizer)
            if adam_groups.has_hooks_before(optimizer):
                for p in own:
                    p.grad = None
        self._gradients = {}

    def _rates(self, r: int, there: Sequence[int], gradients: Sequence[Tensor]) -> list[float]:
        """Calls the pre-step hooks and returns the learning rate of each weight of a run that has a gradient."""
        optimizer, own = self._optimizers[r], self._own[r]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        found = [rates[self._group[i]] for i in there]
        if not adam_groups.has_hooks_before(optimizer):
            return found
        for i, gradient in zip(there, gradients):
            own[i].grad = gradient
        adam_groups.call_hooks_before(optimizer)
        if not adam_groups.is_answered(optimizer):
            return found
        left = adam_groups.stepped(optimizer)
        return [rate if id(own[i]) in left else _NOT_STEPPED for i, rate in zip(there, found)]

    @torch.no_grad()
    def _take_state(self) -> None:
        """Replaces the state of each optimizer with views of the joint means, variances and step counts."""
        self._means, self._variances = ([torch.zeros_like(p) for p in self._weights] for _ in range(2))
        self._done = torch.zeros(len(self._weights), len(self._optimizers))
        for r, (optimizer, table) in enumerate(zip(self._optimizers, self._own)):
            for i, p in enumerate(table):
                new = {"step": self._done[i, r], "exp_avg": self._means[i][r], "exp_avg_sq": self._variances[i][r]}
                for name, x in optimizer.state.get(p, {}).items():
                    new[name].copy_(x)
                optimizer.state[p] = new


def _places(optimizer: Optimizer, own: StackParameters) -> list[int]:
    """Returns the index of the parameter group of each weight."""
    of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [of[id(p)] for p in own]


def _fits(optimizer: Optimizer, own: StackParameters) -> bool:
    """True if the optimizer is an AdamW for exactly these weights and the joint pass can reproduce its step."""
    groups = optimizer.param_groups
    known = isinstance(optimizer, AdamW) and adam_groups.is_known(optimizer) and not adam_groups.is_answered(optimizer)
    every = {id(p) for group in groups for p in group["params"]} == {id(p) for p in own}
    states = all(_STATE.issuperset(optimizer.state.get(p, {})) for p in own)
    return known and every and states and all(map(_is_usual, groups))


def _is_usual(group: adam_groups.Group) -> bool:
    decoupled = group["decoupled_weight_decay"] and not group["amsgrad"] and not group["maximize"]
    return decoupled and adam_groups.is_fused(group)


def _about(optimizer: Optimizer, own: StackParameters) -> tuple[object, ...]:
    """Returns the settings that must be equal for all runs; β and ε must also be equal for all groups."""
    options = {(*group["betas"], group["eps"]) for group in optimizer.param_groups}
    return _places(optimizer, own), options if len(options) == 1 else optimizer


# Losses, gradients and measurements of all runs at once, with torch's operators on one stacked model.
#
# Each run keeps its own model, optimizer and remedy; its weights are views of the stacked weights. The stack only
# computes losses and gradients, so optimizers, step remedies and checkpoints work unchanged.


class StackedArithmetic(TrainingBackend):
    """One forward and one backward pass for all runs, with torch's clipping and optimizer steps run by run.

    With `compiled`, modules are replaced with modules that use compiled operators, with equal results up to rounding.

    Raises:
        RefusedError: the model of the runs cannot be stacked.
    """

    def __init__(self, runs: Sequence[RunState], reason: str = "", *, compiled: bool = False) -> None:
        super().__init__(runs, reason)
        self.model = stack_models([run.model for run in runs], compiled=compiled)
        self.model.train()
        whole = dict(self.model.named_parameters())
        self.stacked = [whole[name] for name, _ in runs[0].model.named_parameters()]
        attends = [module.attend for module in self.model.modules() if isinstance(module, SpecModule)]
        self._layers: list[list[Seen]] = []
        self._attentions = [attend for attend in attends if isinstance(attend, StackedAttention)]

    def losses_and_gradients(self, batches: Sequence[Examples], seeds: Sequence[int]) -> Tensor:
        logits = self.model(torch.cat([batch.inputs for batch in batches]))
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        losses, gradients = self.backward(logits.unflatten(0, (len(self.runs), -1)).flatten(1, 2), targets)
        self.keep(gradients)
        return losses

    def backward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Returns the losses [runs] and gradients [runs ...] for logits [runs n vocab] and targets [runs·n]."""
        runs, surprise = len(logits), F.log_softmax(logits.flatten(0, 1), -1)
        pairs = zip(surprise.detach().chunk(runs), targets.chunk(runs))
        losses = torch.stack([F.nll_loss(mine, right) for mine, right in pairs])
        # Differentiate each run's mean separately, so that NaN in one run does not spread to the others.
        each = F.nll_loss(surprise, targets, reduction="none")
        share = torch.full_like(each, runs).div_(len(each))
        return losses, torch.autograd.grad(each, self.stacked, share, allow_unused=True)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the gradients of each run to its part of the gradients [runs ...]."""
        # Fused optimizers assume that gradients have the memory layout of the weights.
        parts = [[None] * len(self.runs) if g is None else g.contiguous().unbind(0) for g in gradients]
        for r, own in enumerate(self.parameters):
            for p, part in zip(own, parts):
                p.grad = part[r]

    def remember(self) -> None:
        self._layers = []
        keep = lambda calls: self._layers.append([frozen(call) for call in calls])  # noqa: E731
        with measuring(self.model), _reporting(self._attentions, keep):
            self.model(self.runs[0].probed.inputs.repeat(len(self.runs), 1))

    def probe(self) -> list[ProbeStatistics]:
        found: list[list[LogitStats]] = [[] for _ in self.runs]
        before, self._layers = self._layers[::-1], []
        changes: list[list[Tensor]] = [[] for _ in self.runs]

        def report(calls: Sequence[AttentionCall]) -> None:
            for mine, change in zip(changes, self._changes(before.pop(), calls) if before else ()):
                mine.append(change)
            each = [statistics(call) for call in calls]
            for mine, stats in zip(found, each if len(each) == len(found) else split(each[0], len(found))):
                mine.append(stats)

        inputs = self.runs[0].probed.inputs
        with measuring(self.model), _reporting(self._attentions, report):
            self.model(inputs.repeat(len(self.runs), 1))
        probes = [summed_up(stats) for stats in found]
        return [ProbeStatistics({**p.record, **mean_change(mine)}, p.heads) for p, mine in zip(probes, changes)]

    def _changes(self, before: Sequence[Seen], after: Sequence[AttentionCall]) -> Sequence[Tensor]:
        """Returns the root mean square change of a layer's logits, as one [h] per run; () if unknown."""
        try:
            found = [change_between(*pair) for pair in zip(before, after)]
        except RefusedError:  # a position encoding that cannot be folded into q and k
            return ()
        return torch.cat([change.rms for change in found if change is not None]).chunk(len(self.runs))

    def evaluate(self) -> list[dict[str, float]]:
        first, n = self.runs[0], len(self.runs)
        total = torch.zeros(n, dtype=torch.float64)
        with measuring(self.model):
            for part in first.heldout.split(4 * first.config.data.batch):
                logits = self.model(part.inputs.repeat(n, 1)).unflatten(0, (n, -1))
                total += self.mean_losses(logits, part.targets).double() * len(part.inputs)
        means = (total / len(first.heldout.inputs)).tolist()
        return [{"val_loss": x if math.isfinite(x) else math.nan} for x in means]

    def mean_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each run [runs] on the same targets [b t], from logits [runs b t vocab]."""
        return torch.stack([token_loss(mine, targets) for mine in logits])


@contextmanager
def _reporting(attentions: Sequence[StackedAttention], report: Report) -> Iterator[None]:
    for attention in attentions:
        attention.report = report
    try:
        yield
    finally:
        for attention in attentions:
            attention.report = None


def split(stats: LogitStats, runs: int) -> list[LogitStats]:
    """Splits the statistics of heads [runs·h] into one object per run, each with heads [h]."""
    values = {name: getattr(stats, name) for name in TENSORS}
    if any(len(x) % runs for x in values.values()):
        raise ShapeError(f"expected statistics of the heads of {runs} runs, got {len(stats.max_logit)} heads")
    parts = {name: x.chunk(runs) for name, x in values.items()}
    return [dataclasses.replace(stats, **{name: x[r] for name, x in parts.items()}) for r in range(runs)]


# The choice of backend, and the fastest one: a stack of small models with compiled operators.
#
# Each compiled operator computes a run only from the run's own data, in an order of summation that depends only on the
# shape. A run therefore has bit-identical results alone and in every stack.


def choose_arithmetic(runs: Sequence[RunState]) -> TrainingBackend:
    """Returns the fastest backend for these runs; its `reason` says why no faster backend can be used.

    A single run uses compiled operators whenever it would use them in a stack, so that its results are bit-identical in
    both cases.
    """
    config = runs[0].config
    slow = why_not_compiled(config)
    if not slow:
        return CompiledArithmetic(runs)
    if len(runs) > 1 and not why_not_stacked(config):
        return StackedArithmetic(runs, slow)
    return TrainingBackend(runs, slow)


def why_not_compiled(config: RunConfig) -> str:
    """Returns why compiled operators cannot run this configuration; "" if they can."""
    if reason := why_not_stacked(config):
        return reason
    if not small(config):
        return "the model is so large that one run keeps a core busy"
    return "" if operators.stacked_ready() else "the compiled operators are switched off or not available here"


@final
class CompiledArithmetic(StackedArithmetic):
    """A stacked model of compiled modules; optimizers other than torch's fused AdamW take their steps run by run."""

    def __init__(self, runs: Sequence[RunState]) -> None:
        super().__init__(runs, compiled=True)
        self._adamw = StackedAdamW.of([run.optimizer for run in runs], self.stacked, self.parameters)

    def backward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        share = logits.data  # has its own version counter; otherwise autograd would report an in-place change
        losses = operators.cross_entropy_(share, targets, grad=True)
        return losses, torch.autograd.grad(logits, self.stacked, share, allow_unused=True)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        if self._adamw is None:
            super().keep(gradients)
        else:
            self._adamw.keep(gradients)

    def clip(self, limit: float) -> Tensor:
        return super().clip(limit) if self._adamw is None else self._adamw.clip(limit)

    def optimizer_step(self) -> None:
        if self._adamw is None:
            super().optimizer_step()
        else:
            self._adamw.step()

    def mean_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return operators.cross_entropy_(logits.flatten(1, 2), targets.contiguous(), grad=False)
