"""The training step: the one that every run takes, alone or in a stack, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkeel.lab.model.optimizers import RATE, learning_rate
from qkeel.lab.tasks.task import Examples
from qkeel.lab.training.arithmetic import Arithmetic
from qkeel.lab.training.run_state import RunState


def train_step(arithmetic: Arithmetic, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns each run's loss on its batch [runs], and the norm of its gradient before clipping [runs].

    The arithmetic computes; what is computed, and in which order, stands here alone. No device is waited for.

    Args:
        arithmetic: of runs that differ in seed, steps, rates and decay only. steps: how many each has done before.
    """
    runs = arithmetic.runs
    for run, step in zip(runs, steps, strict=True):
        set_rate(run, step)
    batches = read_batches(runs, steps)
    # Dropout's random numbers are, like the batch, a function of (seed, step).
    losses = arithmetic.losses_and_gradients(batches, [r.config.seed * 1_000_003 + s for r, s in zip(runs, steps)])
    norms = arithmetic.clip(runs[0].config.optim.grad_clip)
    arithmetic.optimizer_step()
    return losses, norms


def set_rate(run: RunState, step: int) -> None:
    """Gives the groups of the run's optimizer the learning rate of a step, each its multiple."""
    rate = learning_rate(run.config.optim, step, run.config.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get(RATE, 1.0)


def read_batches(runs: Sequence[RunState], steps: Sequence[int]) -> list[Examples]:
    """Returns the examples of each run's step, on its device; runs of one seed at one step share theirs."""
    keys = [(run.config.seed, step) for run, step in zip(runs, steps)]
    read = {key: runs[0].task.batch(*key).to(runs[0].device) for key in dict.fromkeys(keys)}
    return [read[key] for key in keys]
