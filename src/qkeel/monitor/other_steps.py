"""Notices that the steps of the watched optimizer have ended because another optimizer trains the model."""

from __future__ import annotations

import weakref
from typing import final

from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.errors import caution
from qkeel.monitor.step_end import WatchedModels
from qkeel.patching.autograd import version_of
from qkeel.patching.modes import parameters_of
from qkeel.patching.optimizers import stepping

OTHER_STEPS = (
    "the optimizer that is watched ({}) took no step while something else changed the model's weights between the last "
    "{} passes, so nothing is recorded any more. If another optimizer trains the model now, close() this monitor and "
    "call qkeel.watch(model, optimizer) with that one"
)
# As in remedies: one is a loaded state, or a perturbation of the weights.
_PASSES = 3


@final
class OtherSteps:
    """Warns once if a query weight changes before each of three passes in a row without a step of the optimizer."""

    def __init__(self, models: WatchedModels, optimizer: Optimizer) -> None:
        self._models, self._optimizer = models, weakref.ref(optimizer)
        self._kind = type(optimizer).__name__
        self._before: tuple[int, int] | None = None
        self._passes = 0
        #: The name of the weight; "" where none is known.
        self._weight: str | None = None

    def stepped(self) -> None:
        """Must be called after each step of the optimizer."""
        self._before, self._passes = None, 0

    def pass_begins(self) -> None:
        """Must be called before each pass that may be trained."""
        weight, before = self._version(), self._before
        self._before = weight
        if weight is None or before is None or weight == before:
            return
        self._passes += 1
        # Some optimizers make passes in their step.
        if self._passes == _PASSES and self._optimizer() not in stepping():
            caution(OTHER_STEPS.format(self._kind, _PASSES))

    def pass_ends(self) -> None:
        """Must be called after each measured pass: a forward that writes the weight, to keep it normalised, hides steps."""
        weight = self._version()
        if None not in (weight, self._before) and weight != self._before:
            self._weight = ""

    def _version(self) -> tuple[int, int] | None:
        """The weight's object and version, or None where they would not show a step."""
        if self._weight is None and (sites := self._models.sites):
            slices = [s for site in sites for s in site.query]
            self._weight = slices[0].parameter if slices else ""
        if not self._weight:
            return None
        owner, _, name = self._weight.rpartition(".")
        p = parameters_of(self._models.whole.get_submodule(owner)).get(name)
        # fully_shard exchanges parameters during passes.
        return None if p is None or dist.is_split(p) else (id(p), version_of(p))
