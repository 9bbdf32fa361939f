"""Many runs of one model trained as one: a step, the probe and the evaluation of all of them at once.

A run keeps its own model, optimizer and remedy; its weights are parts of the stack's. The stack computes losses and
gradients, the runs' optimizers do the rest, so that remedies that act on steps, and checkpoints, know nothing of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import ShapeError
from qkeel.functional.stats import TENSORS, LogitStats
from qkeel.kernels.native import twins
from qkeel.lab.config import RunConfig
from qkeel.lab.evaluate import Probe, measuring, summed_up, token_loss
from qkeel.lab.joint import JointAdamW
from qkeel.lab.stackable import small, stackable
from qkeel.lab.trainer import Trainer
from qkeel.lab.twins import StackedAttend, stacked
from qkeel.nn.core import SpecModule
from qkeel.sites.intercept import statistics
from qkeel.spec import AttentionCall


@final
class Stack:
    """Trainers whose configurations differ in learning rate and seed. They may be at different steps.

    Small models are computed by compiled operators of their own where there are any, see `fused`.

    Raises: RefusedError if their model cannot be stacked.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers = trainers
        self.fused = fused(trainers[0].config)
        self.model = stacked([trainer.trained.model for trainer in trainers], self.fused)
        self.model.train()
        whole = dict(self.model.named_parameters())
        own = [dict(trainer.trained.model.named_parameters()) for trainer in trainers]
        self._parameters = [whole[name] for name in own[0]]
        self._own = [list(table.values()) for table in own]
        self._joint = (
            JointAdamW.of([t.trained.optimizer for t in trainers], self._parameters, self._own) if self.fused else None
        )
        self._attends = [module.__dict__["attend"] for module in self.model.modules() if isinstance(module, SpecModule)]

    def step(self, steps: Sequence[int]) -> tuple[list[float], list[float]]:
        """One optimizer step of each run, `steps` done before it: losses, and norms of gradients before clipping."""
        first = self.trainers[0]
        batches = {(t.config.seed, step): None for t, step in zip(self.trainers, steps)}
        read = {key: first.task.batch(*key).to(first.device) for key in batches}
        examples = [read[t.config.seed, step] for t, step in zip(self.trainers, steps)]
        logits = self.model(torch.cat([x.inputs for x in examples]))
        targets = torch.cat([x.targets.flatten() for x in examples])
        losses, found = self._backward(logits.unflatten(0, (len(examples), -1)).flatten(1, 2), targets)
        for trainer, step in zip(self.trainers, steps):
            trainer.set_rate(step)
        if self._joint is not None:
            norms = self._joint.step(found, first.config.optim.grad_clip)
        else:
            norms = torch.stack(self._steps(found))
        return losses.tolist(), norms.tolist()

    def _backward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The loss of each run by its logits [runs n vocab] and targets [runs·n], and gradients by parameter."""
        if self.fused:
            share = logits.data  # with a count of changes of its own: logits would be taken for changed
            losses = twins.cross_entropy_(share, targets, grad=True)
            return losses, list(torch.autograd.grad(logits, self._parameters, share, allow_unused=True))
        runs, surprise = len(logits), F.log_softmax(logits.flatten(0, 1), -1)
        pairs = zip(surprise.detach().chunk(runs), targets.chunk(runs))
        losses = torch.stack([F.nll_loss(mine, right) for mine, right in pairs])
        # Each run's mean by its derivative: also where another run's is NaN.
        each = F.nll_loss(surprise, targets, reduction="none")
        share = torch.full_like(each, runs).div_(len(each))
        return losses, list(torch.autograd.grad(each, self._parameters, share, allow_unused=True))

    def _steps(self, found: Sequence[Tensor | None]) -> list[Tensor]:
        """The step of each run's own optimizer: norms of gradients before clipping."""
        # A fused optimizer takes it that gradients lie in memory as weights do.
        parts = [[None] * len(self.trainers) if g is None else g.contiguous().unbind(0) for g in found]
        for own, r in zip(self._own, range(len(self.trainers))):
            for p, part in zip(own, parts):
                p.grad = part[r]
        return [trainer.finish_step(own) for trainer, own in zip(self.trainers, self._own)]

    def probe(self) -> list[Probe]:
        """`Trainer.probe` of each run."""
        found: list[list[LogitStats]] = [[] for _ in self.trainers]

        def report(calls: Sequence[AttentionCall]) -> None:
            each = [statistics(call) for call in calls]
            for mine, stats in zip(found, each if len(each) == len(found) else split(each[0], len(found))):
                mine.append(stats)

        inputs = self.trainers[0].probed.inputs
        with measuring(self.model), _reporting(self._attends, report):
            self.model(inputs.repeat(len(self.trainers), 1))
        return [summed_up(stats) for stats in found]

    def evaluate(self) -> list[dict[str, float]]:
        """`Trainer.evaluate` of each run."""
        first, n = self.trainers[0], len(self.trainers)
        total: Tensor | float = 0.0
        with measuring(self.model):
            for part in first.heldout.split(4 * first.config.data.batch):
                logits = self.model(part.inputs.repeat(n, 1))
                losses = self._losses(logits, part.targets)
                total = total + losses.double() * len(part.inputs)
        assert isinstance(total, Tensor)
        means = (total / len(first.heldout.inputs)).tolist()
        return [{"val_loss": x if math.isfinite(x) else math.nan} for x in means]

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each run [runs], of the same targets."""
        own = logits.unflatten(0, (len(self.trainers), -1))
        if self.fused:
            return twins.cross_entropy_(own.flatten(1, 2), targets.contiguous(), grad=False)
        return torch.stack([token_loss(mine, targets) for mine in own])


@final
class Single:
    """A trainer as a stack of one: what it computes is what it computes among others."""

    def __init__(self, trainer: Trainer) -> None:
        self._stack = Stack([trainer])

    def step(self, step: int) -> tuple[float, float]:
        """`Trainer.step`."""
        losses, norms = self._stack.step([step])
        return losses[0], norms[0]

    def probe(self) -> Probe:
        """`Trainer.probe`."""
        return self._stack.probe()[0]

    def evaluate(self) -> dict[str, float]:
        """`Trainer.evaluate`."""
        return self._stack.evaluate()[0]


def fused(config: RunConfig) -> bool:
    """Whether runs of a resolved configuration, alone or stacked, are computed by the compiled operators of stacks."""
    return stackable(config) and small(config) and twins.ready()


@contextmanager
def _reporting(attends: Sequence[StackedAttend], report: object) -> Iterator[None]:
    for attend in attends:
        attend.report = report  # type: ignore[assignment]
    try:
        yield
    finally:
        for attend in attends:
            attend.report = None


def split(stats: LogitStats, runs: int) -> list[LogitStats]:
    """Statistics of heads [runs·h] as those of each run [h]."""
    values = {name: getattr(stats, name) for name in TENSORS}
    if any(len(x) % runs for x in values.values()):
        raise ShapeError(f"expected statistics of the heads of {runs} runs, got {len(stats.max_logit)} heads")
    parts = {name: x.chunk(runs) for name, x in values.items()}
    return [dataclasses.replace(stats, **{name: x[r] for name, x in parts.items()}) for r in range(runs)]
