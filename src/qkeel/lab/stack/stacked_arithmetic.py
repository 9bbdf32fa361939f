"""The losses, gradients and measurements of all runs of a stack at once, by torch's operators on one stacked model.

A run keeps its own model, optimizer and remedy; its weights are parts of the stack's. The stack computes losses and
gradients, the runs' optimizers do the rest, so that remedies that act on steps, and checkpoints, know nothing of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.capture.statistics import Seen, statistics
from qkeel.errors import RefusedError, ShapeError
from qkeel.functional.statistics.logit_stats import TENSORS, LogitStats
from qkeel.lab.stack.stack_models import stack_models
from qkeel.lab.stack.stacked_attention import Report, StackedAttention
from qkeel.lab.tasks.task import Examples
from qkeel.lab.training.arithmetic import Arithmetic
from qkeel.lab.training.evaluate import Probe, mean_change, measuring, summed_up, token_loss
from qkeel.lab.training.run_state import RunState
from qkeel.monitor.measure.logit_changes import change_between, frozen
from qkeel.nn.spec_module import SpecModule
from qkeel.spec import AttentionCall


class StackedArithmetic(Arithmetic):
    """One forward and one backward pass for all runs; clipping and steps are torch's, run by run.

    `compiled` exchanges modules of the model for compiled ones, which are there: the same but for rounding.

    Raises: RefusedError if the runs' model cannot be stacked.
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
        """Returns losses [runs], and gradients [runs ...] by parameter: logits [runs n vocab], targets [runs·n]."""
        runs, surprise = len(logits), F.log_softmax(logits.flatten(0, 1), -1)
        pairs = zip(surprise.detach().chunk(runs), targets.chunk(runs))
        losses = torch.stack([F.nll_loss(mine, right) for mine, right in pairs])
        # Each run's mean by its derivative: also where another run's is NaN.
        each = F.nll_loss(surprise, targets, reduction="none")
        share = torch.full_like(each, runs).div_(len(each))
        return losses, torch.autograd.grad(each, self.stacked, share, allow_unused=True)

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Gives the runs their parts of the gradients [runs ...]."""
        # A fused optimizer takes it that gradients lie in memory as weights do.
        parts = [[None] * len(self.runs) if g is None else g.contiguous().unbind(0) for g in gradients]
        for r, own in enumerate(self.parameters):
            for p, part in zip(own, parts):
                p.grad = part[r]

    def remember(self) -> None:
        self._layers = []
        keep = lambda calls: self._layers.append([frozen(call) for call in calls])  # noqa: E731
        with measuring(self.model), _reporting(self._attentions, keep):
            self.model(self.runs[0].probed.inputs.repeat(len(self.runs), 1))

    def probe(self) -> list[Probe]:
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
        return [Probe({**p.record, **mean_change(mine)}, p.heads) for p, mine in zip(probes, changes)]

    def _changes(self, before: Sequence[Seen], after: Sequence[AttentionCall]) -> Sequence[Tensor]:
        """Root mean square changes of a layer's logits, [h] of each run; () where they are not known."""
        try:
            found = [change_between(*pair) for pair in zip(before, after)]
        except RefusedError:  # a position that does not fold into q and k
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
        """Returns the loss of each run [runs] on the same targets [b t]: logits [runs b t vocab]."""
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
    """Returns statistics of heads [runs·h] as those of each run [h]."""
    values = {name: getattr(stats, name) for name in TENSORS}
    if any(len(x) % runs for x in values.values()):
        raise ShapeError(f"expected statistics of the heads of {runs} runs, got {len(stats.max_logit)} heads")
    parts = {name: x.chunk(runs) for name, x in values.items()}
    return [dataclasses.replace(stats, **{name: x[r] for name, x in parts.items()}) for r in range(runs)]
