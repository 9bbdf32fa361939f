"""Mixed precision: float32 copies that an optimizer steps in place of a weight, and steps that a GradScaler skips."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel import dist
from qkeel.patching.optimizer_hooks import runs_step_hooks

LOW_PRECISION = (torch.bfloat16, torch.float16)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps: wrappers that are none themselves (accelerate's) run no hooks. A wrapper
    that runs hooks, and steps another optimizer inside its own step, is kept: it may do more than that one."""
    while not runs_step_hooks(optimizer):
        inner = vars(optimizer).get("optimizer")
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """The tensor that a GradScaler gives a fused optimizer: not zero where the step, whose hooks run, is skipped."""
    return vars(optimizer).get("found_inf")


def stepped(optimizer: Optimizer, weight: Tensor) -> Tensor | None:
    """The tensor in the optimizer's groups that becomes the weight: itself, or its one float32 copy.

    Training in low precision the way of apex and Megatron gives the optimizer float32 copies, and copies them back
    after each step. Such a copy is recognised by its values: of one shape and device, rounding to the weight's bits.
    """
    held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p is weight for p in held):
        return weight
    copies = [p for p in held if _rounds_to(p, weight)]
    return copies[0] if len(copies) == 1 else None


def copies_in_state(optimizer: Optimizer, weight: Tensor) -> tuple[str, ...]:
    """Under which names the optimizer keeps float32 copies of a low-precision weight in its state."""
    state: dict[str, object] = optimizer.state.get(weight, {})
    return tuple(name for name, x in state.items() if isinstance(x, Tensor) and _rounds_to(x, weight))


def _rounds_to(copy: Tensor, weight: Tensor) -> bool:
    return (
        weight.dtype in LOW_PRECISION
        and copy.dtype == torch.float32
        and copy.shape == weight.shape
        and copy.device == weight.device
        and not (dist.is_split(copy) or dist.is_split(weight))
        and torch.equal(copy.detach().to(weight.dtype), weight.detach())
    )
