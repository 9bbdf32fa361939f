"""Notices that parameters which a remedy has added are in no optimizer, and so do not train."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qkeel.errors import caution
from qkeel.handle import Handle
from qkeel.patching.autograd import writes_to

# The steps of the other weights after which a parameter that has a gradient and has not moved is told of.
_STEPS = 2


def notice_untrained(
    model: nn.Module, before: Mapping[str, nn.Parameter], remedy: str
) -> Handle:
    """Warns once if the parameters that were there `before` a remedy take steps, and the remedy's own take none.

    Read whenever a gradient arrives at the first of its own, until that is decided. Once the model is sharded, its
    parameters are other objects, and nothing is said.
    """
    earlier_ids = {id(parameter) for parameter in before.values()}
    others = [parameter for parameter in before.values() if parameter.requires_grad]
    added = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in earlier_ids
    }
    if not added or not others:
        return Handle(lambda: None)
    name, first = next(iter(added.items()))
    start: Tensor | None = None
    versions, steps = 0, 0

    @torch.no_grad()
    def on_gradient(parameter: Tensor) -> None:
        nonlocal start, versions, steps
        if steps >= _STEPS:
            return
        current = writes_to(others)
        if start is None:
            # Not when the remedy was applied: a retrofit has fitted its gains since.
            start, versions = parameter.detach().clone(), current
        steps += current != versions
        versions = current
        if steps < _STEPS or parameter.grad is None:
            return
        if torch.equal(parameter, start) and bool(parameter.grad.any()):
            caution(
                f"the {len(added)} parameters that {remedy} has added, {name} first, do not train: no optimizer holds "
                "them. Make the optimizer after the remedy, or pass the one that is there as optimizer="
            )

    hook = first.register_post_accumulate_grad_hook(on_gradient)
    return Handle(hook.remove)
