"""Which tensor an optimizer steps for a weight: the weight, or the float32 copy that it is rounded from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LOW_PRECISION = (torch.bfloat16, torch.float16)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps: wrappers that are none themselves (accelerate's) run no hooks.

    One that did, and steps another inside its own step, is kept: it may do more than the one inside.
    """
    while "_optimizer_step_post_hooks" not in vars(optimizer):
        inner = vars(optimizer).get("optimizer")
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def stepped(optimizer: Optimizer, weight: Tensor) -> Tensor | None:
    """The tensor in the optimizer's groups that becomes the weight: itself, or its one float32 copy.

    Training in low precision the way of apex and Megatron gives the optimizer float32 copies, and copies them back
    after each step. Such a copy is known by its values: of one shape and device, rounding to the weight's bits.
    """
    held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p is weight for p in held):
        return weight
    copies = [p for p in held if _rounds_to(p, weight)]
    return copies[0] if len(copies) == 1 else None


def copies_in_state(optimizer: Optimizer, weight: Tensor) -> tuple[str, ...]:
    """Under which names the optimizer keeps float32 copies of a low-precision weight in its state."""
    state: dict[str, Any] = optimizer.state.get(weight, {})
    return tuple(name for name, x in state.items() if isinstance(x, Tensor) and _rounds_to(x, weight))


def _rounds_to(copy: Tensor, weight: Tensor) -> bool:
    return (
        weight.dtype in LOW_PRECISION
        and copy.dtype == torch.float32
        and copy.shape == weight.shape
        and copy.device == weight.device
        and torch.equal(copy.detach().to(weight.dtype), weight.detach())
    )
