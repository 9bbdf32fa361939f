"""The choice of how a group of runs is computed, and the fastest way: a stack of small models by compiled operators.

Each of these operators computes a run's numbers from that run's alone, and sums them in an order that its shape gives:
so a run has the same bits alone and in every stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from qkeel.kernels.native import stacked_ops
from qkeel.lab.config import RunConfig
from qkeel.lab.stack.stacked_adamw import StackedAdamW
from qkeel.lab.stack.stacked_arithmetic import StackedArithmetic
from qkeel.lab.stack.what_runs_share import small, why_not_stacked
from qkeel.lab.training.arithmetic import Arithmetic
from qkeel.lab.training.run_state import RunState


def choose_arithmetic(runs: Sequence[RunState]) -> Arithmetic:
    """Returns the fastest way to the numbers of these runs; its `reason` says why it is not a faster one.

    A run alone is computed by compiled operators wherever it would be in a stack: so it has the same bits there.
    """
    config = runs[0].config
    slow = why_not_compiled(config)
    if not slow:
        return CompiledArithmetic(runs)
    if len(runs) > 1 and not why_not_stacked(config):
        return StackedArithmetic(runs, slow)
    return Arithmetic(runs, slow)


def why_not_compiled(config: RunConfig) -> str:
    """The reason why compiled operators of stacks do not compute runs of a configuration; empty where they do."""
    if reason := why_not_stacked(config):
        return reason
    if not small(config):
        return "the model is so large that its products fill a core"
    return "" if stacked_ops.ready() else "the compiled operators are off or not available here"


@final
class CompiledArithmetic(StackedArithmetic):
    """A stacked model of compiled modules; optimizers other than torch's fused AdamW step run by run."""

    def __init__(self, runs: Sequence[RunState]) -> None:
        super().__init__(runs, compiled=True)
        self._adamw = StackedAdamW.of([run.optimizer for run in runs], self.stacked, self.parameters)

    def backward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        share = logits.data  # with a count of changes of its own: logits would be taken for changed
        losses = stacked_ops.cross_entropy_(share, targets, grad=True)
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
        return stacked_ops.cross_entropy_(logits.flatten(1, 2), targets.contiguous(), grad=False)
