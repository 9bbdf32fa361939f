"""The training loop of a run, which can be killed at any moment and resumed to a bit-identical result."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from qkeel.capture.calls import Seen
from qkeel.errors import RunDirectoryError
from qkeel.functional.class_statistics import TokenClasses
from qkeel.functional.logits import z_loss
from qkeel.lab.build_run import autocast, check, learning_rate, resolve, threads
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import RunConfig
from qkeel.lab.run_claims import claimed
from qkeel.lab.run_record import (
    ProbeStatistics,
    RunRecord,
    Watcher,
    heldout_numbers,
    mark_failed,
    measuring,
    probe,
    remembered,
    token_loss,
)
from qkeel.lab.tasks import load_task
from qkeel.records import RunDirectory, RunStatus

# A prime, so that (seed, step) gives each step its own random numbers.
_SEEDS = 1_000_003


def run(
    config: RunConfig,
    directory: str | Path,
    *,
    command: str = "",
    watcher: Watcher | None = None,
    wait: float = 0.0,
) -> RunDirectory:
    """Trains, evaluates and records one configuration; a finished run is not repeated.

    >>> import tempfile
    >>> run(RunConfig(steps=1, eval_sequences=1), tempfile.mkdtemp()).status.name
    'DONE'

    Args:
        config: the configuration.
        directory: a new or empty directory, or the directory of an earlier run of this configuration, which is then
            resumed.
        command: the user's command line, which is recorded.
        watcher: callbacks that follow the run.
        wait: the number of seconds to wait for another process that uses the directory.

    Raises:
        RunDirectoryError: the directory belongs to another run, is in use, is damaged or is not writable.
        DataError: the corpus cannot be read.
        InvalidValueError: the configuration cannot be run.
        UnknownNameError: the configuration contains an unknown name.
    """
    config = resolve(config)
    # What the configuration cannot be is said before anything is written.
    check(config)
    load_task(config)
    run_directory = RunDirectory(Path(directory))
    with threads(config.threads), claimed(run_directory, wait) as claim:
        claim.open(config)
        if run_directory.status is RunStatus.DONE:
            return run_directory
        try:
            record = RunRecord(config, run_directory, watcher or Watcher(), claim)
            record.prepare(command)
            train(record)
        # The directory is at fault, or another process works in it: nothing is written there.
        except RunDirectoryError:
            raise
        except Exception:
            mark_failed(run_directory)
            raise
    return run_directory


def train(record: RunRecord) -> None:
    """Takes the remaining steps of a run, records and saves it when due, and writes its summary.

    Raises:
        KeyboardInterrupt: the watcher asked to stop; a checkpoint was written.
    """
    state = record.state
    # The record of step 0 shows the initial weights: collapse is judged against their loss.
    if record.step == 0:
        record.write(None, measure_probe(state), evaluate(state))
    while not record.over:
        is_logged, is_saved = (
            record.is_logged(record.step + 1),
            record.is_saved(record.step + 1),
        )
        # Calls before the step are kept only where its effect on the logits is recorded: they hold q and k.
        before = remember(state) if is_logged else ()
        start = time.perf_counter()
        loss, norm = train_step(state, record.step)
        # Reading a value waits for the device, so the values are read only where something needs them.
        numbers = (float(loss), float(norm)) if is_logged or is_saved else None
        record.count(time.perf_counter() - start)
        if is_logged and numbers is not None:
            statistics = measure_probe(state, before)
            held = (
                evaluate(state, decode=record.over)
                if record.wants_held(*numbers)
                else {}
            )
            record.write(numbers, statistics, held)
        must_stop = not record.over and record.watcher.should_stop()
        # A run that stopped at a loss that is not finite keeps its last sound checkpoint.
        if (must_stop or is_saved) and not record.stopped:
            record.save()
        if must_stop:
            raise KeyboardInterrupt
    record.finish()


def train_step(state: RunState, step: int) -> tuple[Tensor, Tensor]:
    """Takes one optimizer step; returns the loss and the norm of its gradient before clipping.

    Batch and random numbers are functions of (seed, step), so a step is the same in a resumed run. Only loss scaling
    for fp16 waits for the device.

    Args:
        state: the run.
        step: the number of steps that the run has completed.
    """
    config, optimizer, scaler = state.config, state.optimizer, state.scaler
    set_rate(state, step)
    batch = state.task.batch(config.seed, step).to(state.device)
    # Dropout draws from torch's own generator, which a resumed run must find in the state of this step.
    torch.manual_seed(config.seed * _SEEDS + step)
    losses = []
    for examples in batch.split(config.data.batch // config.accumulate):
        with autocast(config):
            logits = state.model(examples.inputs)
        loss = token_loss(logits, examples.targets)
        total = (
            loss + z_loss(logits, config.optim.z_loss) if config.optim.z_loss else loss
        )
        scaler.scale(total / config.accumulate).backward()
        losses.append(loss.detach() / config.accumulate)
    # Clipping and the recorded norm are those of the true gradient, not of the scaled one.
    scaler.unscale_(optimizer)
    parameters = [p for p in state.model.parameters() if p.grad is not None]
    # The norm is recorded even without clipping, so it is computed once, apart from clipping.
    norm = get_total_norm(
        [p.grad for p in parameters if p.grad is not None], foreach=True
    )
    if config.optim.grad_clip:
        clip_grads_with_norm_(parameters, config.optim.grad_clip, norm, foreach=True)
    scaler.step(optimizer)
    optimizer.zero_grad()
    state.update_scale()
    return torch.stack(losses).sum(), norm


def set_rate(state: RunState, step: int) -> None:
    """Sets the learning rate of a step for all parameter groups of the run's optimizer."""
    rate = learning_rate(state.config.optim, step, state.config.steps)
    for group in state.optimizer.param_groups:
        group["lr"] = rate


def remember(state: RunState) -> list[Seen]:
    """Returns the attention calls of a run on its probe, so that `measure_probe` can tell how a step changes them."""
    with autocast(state.config):
        return remembered(state.model, state.probed.inputs)


def measure_probe(state: RunState, before: Sequence[Seen] = ()) -> ProbeStatistics:
    """Returns the attention statistics of a run on its probe; `before` are the calls before the last step."""
    inputs, task, classes = state.probed.inputs, state.task, None
    if task.classes:
        class_of_token = task.input_classes(inputs)
        classes = TokenClasses(
            names=tuple(task.classes), query=class_of_token, key=class_of_token
        )
    with autocast(state.config):
        return probe(state.model, inputs, classes, before)


def evaluate(state: RunState, *, decode: bool = False) -> dict[str, float]:
    """Returns the held-out losses of a run, with NaN for values that are not finite.

    Args:
        state: the run.
        decode: whether to measure also what the task's `decoded` measures, such as BLEU.
    """
    with autocast(state.config):
        numbers = heldout_numbers(
            state.model,
            state.heldout,
            4 * state.config.data.batch,
            state.task,
        )
        if decode:
            with measuring(state.model):
                numbers |= state.task.decoded(state.model, state.heldout)
    return {
        name: value if math.isfinite(value) else math.nan
        for name, value in numbers.items()
    }
