"""The share of each head's weights that weight decay leaves: 1 - rate, from its parameter group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.remedies.steps.linearity import ParamGroup

Rate = Callable[[ParamGroup], float | Tensor]


@final
class DecayFactors:
    """1 - rate for every head of every entry, by the group that holds its tensor, in a few operators per group.

    Args:
        tensors: what the optimizer steps for each entry; None where it steps nothing.
        counts: the number of heads of each entry.
        rate: the share that a group's options take away in one step.
    """

    def __init__(
        self, optimizer: Optimizer, tensors: Sequence[Tensor | None], counts: Sequence[int], rate: Rate
    ) -> None:
        self._optimizer, self._tensors, self._counts, self._rate = optimizer, tensors, counts, rate
        self._values = torch.ones(1)
        self._groups: tuple[int, ...] = ()
        self._index = torch.empty(0, dtype=torch.int64)

    def read(self, dtype: torch.dtype, device: torch.device) -> None:
        """Read the rates as they are now; numbers are never sent to the device, tensors never read by the host."""
        groups = self._optimizer.param_groups
        if (self._values.shape[0], self._values.dtype, self._values.device) != (len(groups) + 1, dtype, device):
            self._values = torch.ones(len(groups) + 1, dtype=dtype, device=device)
        for value, group in zip(self._values.unbind(), groups):
            rate = self._rate(group)
            value.fill_(1 - (rate.reshape(()) if isinstance(rate, Tensor) else rate))

    def row(self, is_stepped: Callable[[Tensor], bool], found_inf: Tensor | None) -> Tensor:
        """[all heads, and a 1]: 1 where a tensor is not stepped, and everywhere in a step that a GradScaler skips."""
        groups = self._optimizer.param_groups
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        numbers = tuple(len(groups) if t is None or not is_stepped(t) else group_of[id(t)] for t in self._tensors)
        if numbers != self._groups or self._index.device != self._values.device:
            self._groups = numbers
            index = [i for i, n in zip(numbers, self._counts) for _ in range(n)]
            self._index = torch.tensor([*index, len(groups)], device=self._values.device)
        if found_inf is None:
            return self._values[self._index]
        # A fused optimizer runs its hooks though a GradScaler skips the step.
        skipped = torch.as_tensor(found_inf).to(self._values.device) != 0
        return torch.where(skipped, 1.0, self._values)[self._index]
