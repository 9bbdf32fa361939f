"""The training step, and its reference implementation in torch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from qkeel.capture.calls import Seen
from qkeel.functional.class_statistics import TokenClasses
from qkeel.functional.logits import z_loss
from qkeel.lab.build_run import RATE, autocast, learning_rate
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import RunConfig
from qkeel.lab.run_record import ProbeStatistics, heldout_numbers, probe, remembered, token_loss
from qkeel.lab.tasks import Examples
from qkeel.patching.modes import multiply_all

# The reference backend. `lab.stack_arithmetic` has faster ones and chooses between them.


class TrainingBackend:
    """Computes the training steps of runs that differ only in seed, steps, rates and decay, and measures their models.

    This one uses torch's operators, one run after the other; every other backend is compared with it. A step calls the
    first three methods in order; gradients stay here between them. `reason` says why no faster backend computes these
    runs; it is empty if there is none.
    """

    def __init__(self, runs: Sequence[RunState], reason: str = "") -> None:
        self.runs, self.reason = runs, reason
        self.parameters = [list(run.model.parameters()) for run in runs]
        self._before: list[list[Seen]] = [[] for _ in runs]

    def losses_and_gradients(self, batches: Sequence[Examples], seeds: Sequence[int]) -> Tensor:
        """Returns the loss of each run on its batch [runs]; `seeds` are for random numbers in the forward pass."""
        return torch.stack([_loss(*each) for each in zip(self.runs, batches, seeds, strict=True)])

    def clip(self, limit: float) -> Tensor:
        """Clips gradients to the norm `limit` (0: no clipping); returns each run's norm before clipping [runs]."""
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
        """Lets each run's optimizer take its step, with the hooks of remedies, and clears the gradients."""
        for run in self.runs:
            if run.loss_scale is None or not run.loss_scale.skips:
                run.optimizer.step()
            run.optimizer.zero_grad()
            if run.loss_scale is not None:
                run.loss_scale.update()

    def remember(self) -> None:
        """Stores the logits of each run on its probe, so that the next `probe` can measure how much they changed."""
        self._before = []
        for run in self.runs:
            with autocast(run.config):
                self._before.append(remembered(run.model, run.probed.inputs))

    def probe(self) -> list[ProbeStatistics]:
        """Returns the attention statistics of each run on its probe."""
        before, self._before = self._before, [[] for _ in self.runs]
        return [_probe(*each) for each in zip(self.runs, before)]

    def evaluate(self) -> list[dict[str, float]]:
        """Returns the held-out numbers of each run; NaN for values that are not finite."""
        return [_evaluate(run) for run in self.runs]


def _loss(run: RunState, batch: Examples, seed: int) -> Tensor:
    """Returns the loss of a batch and adds its gradient to the parameters."""
    config = run.config
    torch.manual_seed(seed)
    parts = batch.split(config.data.batch // config.accumulate)
    return torch.stack([_backward(run, part, config) for part in parts]).sum()


def _backward(run: RunState, examples: Examples, config: RunConfig) -> Tensor:
    """Returns one part's share of the batch loss and adds its gradient."""
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


# Every run takes this step, alone or in a stack, on a CPU or a GPU.


def train_step(arithmetic: TrainingBackend, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns each run's loss on its batch [runs], and the norm of its gradient before clipping [runs].

    It never waits for the device.

    Args:
        arithmetic: the backend of runs that differ only in seed, steps, rates and decay.
        steps: the number of steps each run has completed.
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
    """Sets the learning rate of a step in all groups of the run's optimizer."""
    rate = learning_rate(run.config.optim, step, run.config.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get(RATE, 1.0)


def read_batches(runs: Sequence[RunState], steps: Sequence[int]) -> list[Examples]:
    """Returns the examples of each run's step, on its device; runs with equal seed and step share them."""
    keys = [(run.config.seed, step) for run, step in zip(runs, steps)]
    read = {key: runs[0].task.batch(*key).to(runs[0].device) for key in dict.fromkeys(keys)}
    return [read[key] for key in keys]
