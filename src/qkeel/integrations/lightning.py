"""Lightning: a callback that watches from the start to the end of `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import final

from torch import nn

from qkeel.autopilot import Ladder, attach
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import InvalidValueError, needed
from qkeel.integrations.watched_training import CALLBACK_CADENCE, Sinks, WatchedTraining
from qkeel.monitor import Cadence, Rule
from qkeel.monitor.token_classes import MaskSource
from qkeel.remedies.table import RemedySpec

with needed("qkeel.integrations.lightning", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.utilities.exceptions import MisconfigurationException  # type: ignore[import-not-found]


@final
class LightningCallback(WatchedTraining, Callback):  # type: ignore[misc, no-any-unimported]
    """Watches one module of a LightningModule and passes its summaries to the Trainer's loggers.

    Numbers measured at optimizer step s are logged at step s, however often the Trainer itself logs, and also go to the
    module's `log_dict` for callbacks that read metrics. The last planned step is always measured; a training that stops
    early is recorded up to its latest measured step.

    Lightning calls `training_step` rather than the LightningModule itself, so the callback watches a module inside it:
    its only child with parameters, or the module that `module` names. A LightningModule with several children is
    watched as a whole if its training_step calls `self(batch)`.

    With `remedy`, a remedy that acts on optimizer steps is applied to the optimizers that Lightning has made, and stays
    for good; `handle` is its handle. A refusal is an error in the first pass, before the first step. What the remedy must
    remember is part of the optimizers' checkpoints.

    With `autopilot`, the callback also limits the logits of the heads that need it (`qkeel.autopilot`); the
    optimizers' checkpoints contain its state. When training resumes within an epoch, Lightning repeats the first batches of
    that epoch unless the data loader has a `state_dict()`; with such a loader, the resumed training is bit-identical.

    Args:
        module: the dotted name of the module to watch.
        every: see `qkeel.watch`; by default, every 50th step is measured, and every 5th step during the first 20 steps
            and while logits are changing. Each layer has its own series in addition to the model's.
        sinks: see `qkeel.watch`.
        rules: see `qkeel.watch`.
        query_mask: see `qkeel.watch`.
        autopilot: True for the default policy, or a policy.
        remedy: remedies on optimizer steps, such as "qk_clip:threshold=15,steps=matched" or "lalr:tau=0.1".
        batch: an input of the module, in which an autopilot that resumes finds attention at once.

    Raises:
        InvalidValueError: the remedy changes the model itself, or an autopilot is given too.
    """

    @accepts_earlier_calls()
    def __init__(
        self,
        *,
        module: str | None = None,
        every: int | Cadence = CALLBACK_CADENCE,
        sinks: Sinks = (),
        rules: Sequence[Rule] | None = None,
        query_mask: MaskSource | None = None,
        autopilot: bool | str | Ladder = False,
        remedy: RemedySpec | None = None,
        batch: object = None,
    ) -> None:
        super().__init__(every, sinks, rules, query_mask, autopilot, remedy)
        self._module, self._batch = module, batch
        self._last: float = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts watching with the optimizer that trains the module; by now, a checkpoint has been loaded."""
        self.close(complete=False)
        model = self._watched(pl_module)
        parameter_ids = {id(p) for p in model.parameters()}
        held = [
            o
            for o in trainer.optimizers
            if any(id(p) in parameter_ids for g in o.param_groups for p in g["params"])
        ]
        monitor = self._begin(model, held or None, _step(trainer))
        self._last = -1
        # The number of accumulated batches varies.
        with contextlib.suppress(MisconfigurationException):
            self._last = trainer.estimated_stepping_batches - 1
        if self._policy is not False:
            self.pilot = attach(monitor, held, policy=self._policy, batch=self._batch)
        self._apply(model, held)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Follows the loggers' step count, which includes steps that a GradScaler skips, and measures the last step."""
        if self.monitor is not None:
            self.monitor.steps = max(self.monitor.steps, _step(trainer))
            if self.monitor.steps == self._last:
                self.monitor.measure_next()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Logs the numbers that have arrived from the device so far."""
        summaries: dict[str, float] = {}
        for sample in self._queue.take("train"):
            summaries = sample.summaries()
            for logger in trainer.loggers:
                logger.log_metrics(summaries, step=sample.step)
        if summaries:
            pl_module.log_dict(summaries, logger=False, rank_zero_only=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the rest."""
        # Reading `sample` waits for pending ones.
        if self.monitor is not None and self.monitor.sample is not None:
            for sample in self._queue.take("train"):
                for logger in trainer.loggers:
                    logger.log_metrics(sample.summaries(), step=sample.step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops watching."""
        self.close(complete=True)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stops watching a training run that failed."""
        self.close(complete=False)

    def _watched(self, module: nn.Module) -> nn.Module:
        if self._module is not None:
            watched = dict(module.named_modules()).get(self._module)
            if watched is None:
                names = ", ".join(name for name, _ in module.named_children())
                raise InvalidValueError(
                    f"{type(module).__name__} has no module {self._module!r}; its children: {names}"
                )
            return watched
        children = [
            child
            for child in module.children()
            if any(True for _ in child.parameters())
        ]
        return children[0] if len(children) == 1 else module


def _step(trainer: Trainer) -> int:
    """Returns the step count that Lightning's own loggers use: the number of batches that ended in an optimizer
    step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


# The name until 0.1, which the callback of transformers has too
QkeelCallback = LightningCallback
