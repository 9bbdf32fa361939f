"""The weights that the last step of an optimizer left, told apart from others that took their place."""

from __future__ import annotations

import functools
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.patching.guard import Guarded
from qkeel.patching.optimizer_hooks import StepHooks


@final
class StepWeights:
    """The norm of one weight after each step of an optimizer and after its other hooks, which waits for no device.

    Where a checkpoint is loaded or an average takes the place of the weights, this one changes too.
    """

    def __init__(self, optimizer: Optimizer, guard: Guarded) -> None:
        self._optimizer, self._norm = optimizer, torch.tensor(torch.nan)
        self.hooks = StepHooks(lambda _: self.hooks.come_last(), functools.partial(guard, self._note), optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        self._norm = _norm(optimizer)

    @property
    def unchanged(self) -> bool:
        """Returns whether the weights are as the last step left them."""
        then, now = float(self._norm), float(_norm(self._optimizer))
        return now == then or (now != now and then != then)


def _norm(optimizer: Optimizer) -> Tensor:
    own = [p for group in optimizer.param_groups for p in group["params"] if type(p) is nn.Parameter]
    return torch.linalg.vector_norm(own[len(own) // 2].detach()) if own else torch.zeros(())
