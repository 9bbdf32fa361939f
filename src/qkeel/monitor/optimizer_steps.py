"""The steps of an optimizer, seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.handle import Handle
from qkeel.patching.optimizer_hooks import StepHooks

NOT_SEEN = (
    "the optimizer stepped, but no forward pass of the watched model was seen. Call the model itself, model(...), not "
    "model.forward(...) nor one of its parts, and watch what you call: where that is what torch.compile returned, give "
    "watch() that; where a compiled function calls the model, give torch.compile the model instead"
)


@final
class Steps(Handle):
    """Calls `before(self)` and `after(self)` around each step of an optimizer; what they raise reaches its caller."""

    def __init__(self, optimizer: Optimizer, before: Callable[[Steps], None], after: Callable[[Steps], None]) -> None:
        self.optimizer = optimizer
        self._last: Tensor | None = None
        self._hooks = StepHooks(lambda _: before(self), lambda _: after(self), optimizer)
        super().__init__(lambda: None)

    def remove(self) -> None:
        """Stops both calls."""
        super().remove()
        self._hooks.remove()

    @property
    def skipped(self) -> bool:
        """After a step: whether infinite gradients made it none. GradScaler calls a fused optimizer all the same."""
        found = vars(self.optimizer).get("found_inf")
        return isinstance(found, Tensor) and bool(found.any())

    @property
    def gradient_scale(self) -> Tensor | None:
        """Before a step: by what the gradients are still multiplied; GradScaler leaves that to a fused optimizer."""
        scale = vars(self.optimizer).get("grad_scale")
        return scale if isinstance(scale, Tensor) else None

    @property
    def rate(self) -> Tensor:
        """Inside `after`: the learning rate of the first group in the step before this one, which made the weights
        that this step's forward passes saw; of this one, if it is the first.
        """
        return self._now if self._last is None else self._last

    @property
    def _now(self) -> Tensor:
        rate = self.optimizer.param_groups[0]["lr"]
        return rate.detach().clone() if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)

    def taken(self) -> None:
        """At the end of `after`: this step was one."""
        self._last = self._now
