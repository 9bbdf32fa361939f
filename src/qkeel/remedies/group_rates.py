"""What a rate that parameter groups have leaves of their weights, for every head by a few operators per group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

Rate = Callable[[dict[str, Any]], float | Tensor]


@final
class GroupKeeps:
    """1 - rate for every head of every entry, by the group that holds its tensor."""

    def __init__(
        self, optimizer: Optimizer, tensors: Sequence[Tensor | None], counts: Sequence[int], rate: Rate
    ) -> None:
        self._optimizer, self._tensors, self._counts, self._rate = optimizer, tensors, counts, rate
        self._values = torch.ones(1)
        self._which: tuple[int, ...] = ()
        self._index = torch.empty(0, dtype=torch.int64)

    def read(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the rates as they are now; numbers are never sent to the device, tensors never read."""
        groups = self._optimizer.param_groups
        if (self._values.shape[0], self._values.dtype, self._values.device) != (len(groups) + 1, dtype, device):
            self._values = torch.ones(len(groups) + 1, dtype=dtype, device=device)
        for value, group in zip(self._values.unbind(), groups):
            rate = self._rate(group)
            value.fill_(1 - (rate.reshape(()) if isinstance(rate, Tensor) else rate))

    def row(self, moving: Callable[[Tensor], bool], found_inf: Tensor | None) -> Tensor:
        """[all heads, and a 1]: 1 of tensors that do not move, and all in a step that a GradScaler skips."""
        groups = self._optimizer.param_groups
        of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        which = tuple(len(groups) if t is None or not moving(t) else of[id(t)] for t in self._tensors)
        if which != self._which or self._index.device != self._values.device:
            self._which = which
            index = [i for i, n in zip(which, self._counts) for _ in range(n)]
            self._index = torch.tensor([*index, len(groups)], device=self._values.device)
        values = self._values
        if found_inf is not None:  # a fused optimizer runs its hooks though a GradScaler lets nothing move
            values = torch.where(torch.as_tensor(found_inf).to(values.device) != 0, 1.0, values)
        return values[self._index]
