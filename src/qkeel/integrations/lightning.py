"""Lightning: a callback that watches from the start to the end of `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import final

from torch import nn

from qkeel.autopilot import Policy, attach
from qkeel.errors import InvalidValueError, needed
from qkeel.handle import State
from qkeel.integrations.watched_training import CALLBACK_CADENCE, Sinks, WatchedTraining
from qkeel.monitor import Cadence, Rule
from qkeel.monitor.token_classes import MaskSource

with needed("qkeel.integrations.lightning", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.utilities.exceptions import MisconfigurationException  # type: ignore[import-not-found]


@final
class QkeelCallback(WatchedTraining, Callback):  # type: ignore[misc, no-any-unimported]
    """Watches one module of a LightningModule and gives its summaries to the loggers of the Trainer.

    What is measured at optimizer step s is logged at step s, however often the Trainer itself logs; the module's
    `log_dict` gets it too, for callbacks that look at metrics. The end is measured, early stops included.

    Lightning calls `training_step`, not the LightningModule, so what is watched is the module inside: its only child
    with parameters, or the one that `module` names. Where a LightningModule is the model itself and its training_step
    calls `self(batch)`, several children are fine: then it is watched as a whole.

    With `autopilot` the callback also holds the logits of the heads that need it (`qkeel.autopilot`); its state is in
    Lightning's checkpoints. When training resumes within an epoch, Lightning repeats the first batches of that epoch
    unless the data loader has a `state_dict()`; with such a loader the resumed training is bit for bit the same.

    For every, sinks, rules and query_mask see `qkeel.watch`; by default every 50th step is measured, every 5th of the
    first 20 and while logits are changing. Each layer has a series of its own besides those of the model. module: its
    dotted name. autopilot: true, or its policy. example: what the module takes, which an autopilot needs to resume.
    """

    def __init__(
        self,
        *,
        module: str | None = None,
        every: int | Cadence = CALLBACK_CADENCE,
        sinks: Sinks = (),
        rules: Sequence[Rule] | None = None,
        query_mask: MaskSource | None = None,
        autopilot: bool | str | Policy = False,
        example: object = None,
    ) -> None:
        super().__init__(every, sinks, rules, query_mask, autopilot)
        self._module, self._example = module, example
        self._state: State = {}  # of a checkpoint
        self._last: float = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching, with the optimizer that trains what is watched; a checkpoint has been loaded by now."""
        self.close(complete=False)
        model = self._watched(pl_module)
        own = {id(p) for p in model.parameters()}
        held = [o for o in trainer.optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
        monitor = self._begin(model, held[0] if held else None, _step(trainer))
        self._last = -1
        with contextlib.suppress(MisconfigurationException):  # the number of accumulated batches changes
            self._last = trainer.estimated_stepping_batches - 1
        if self._policy is not False:
            self.pilot = attach(monitor, held, policy=self._policy, example=self._example)
            state, self._state = self._state, {}  # of this fit alone
            if state:
                self.pilot.load_state_dict(state)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Count as the loggers do, steps that a GradScaler skips included, and measure the last step."""
        if self.monitor is not None:
            self.monitor.steps = max(self.monitor.steps, _step(trainer))
            if self.monitor.steps == self._last:
                self.monitor.measure_next()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log what has arrived from the device by now."""
        found: dict[str, float] = {}
        for sample in self._queue.take():
            found = sample.summaries()
            for logger in trainer.loggers:
                logger.log_metrics(found, step=sample.step)
        if found:
            pl_module.log_dict(found, logger=False, rank_zero_only=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the end of a training whose last step was not known, and log the rest."""
        if self.monitor is not None:
            self.monitor.training_over()
        if self.monitor is not None and self.monitor.sample is not None:  # asking for the sample waits for all of them
            for sample in self._queue.take():
                for logger in trainer.loggers:
                    logger.log_metrics(sample.summaries(), step=sample.step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self.close(complete=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching a training that failed."""
        self.close(complete=False)

    def state_dict(self) -> State:
        """Lightning puts it into its checkpoints."""
        return {} if self.pilot is None else self.pilot.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Lightning calls it before `on_fit_start`."""
        self._state = state_dict

    def _watched(self, module: nn.Module) -> nn.Module:
        if self._module is not None:
            found = dict(module.named_modules()).get(self._module)
            if found is None:
                names = ", ".join(name for name, _ in module.named_children())
                raise InvalidValueError(
                    f"{type(module).__name__} has no module {self._module!r}; its children: {names}"
                )
            return found
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        return children[0] if len(children) == 1 else module


def _step(trainer: Trainer) -> int:
    """The step at which Lightning's own loggers stand: batches that ended in a step of an optimizer."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
