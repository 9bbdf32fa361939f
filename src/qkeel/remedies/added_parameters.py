"""Adds the new parameters of a remedy (gains, scales) to the optimizer, and removes them again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.remedies.optimizer_trials import ParamGroup, optimizer_like


def join(
    optimizer: Optimizer | None,
    added: Mapping[str, nn.Parameter],
    near: Tensor,
    *,
    matrices: bool = False,
) -> Handle:
    """Adds parameters (by qualified name) to an optimizer group. The handle removes them and their state.

    They are added to the first group that contains only vectors and scalars, which is where gains usually are, or else
    to the group of `near`. They are therefore decayed like other gains, and an existing scheduler sets their rate too.
    With `matrices` they are weights like `near` and are added to its group.
    """
    if optimizer is None or not added:
        return Handle(lambda: None)
    if isinstance(optimizer, torch.optim.Muon) and not matrices:
        raise RefusedError(
            f"torch's Muon takes matrices only, and {', '.join(added)} are gains; pass the optimizer that holds the "
            "model's norms instead"
        )
    flat = [
        g
        for g in optimizer.param_groups
        if g["params"] and all(p.ndim < 2 for p in g["params"])
    ]
    homes = (flat if not matrices else []) or [
        g for g in optimizer.param_groups if any(p is near for p in g["params"])
    ]
    group = homes[0] if homes else optimizer.param_groups[0]
    # Not a group of its own: schedulers hold a rate for each group that they know.
    group["params"].extend(added.values())
    if "param_names" in group:
        group["param_names"].extend(added)
    for parameter in added.values():
        _start_state(optimizer, parameter, group)

    def undo() -> None:
        gone = {id(p) for p in added.values()}
        kept = [i for i, p in enumerate(group["params"]) if id(p) not in gone]
        for column in ("params", "param_names"):
            if column in group:
                group[column][:] = [group[column][i] for i in kept]
        for parameter in added.values():
            optimizer.state.pop(parameter, None)

    return Handle(undo)


def _start_state(
    optimizer: Optimizer, parameter: nn.Parameter, group: ParamGroup
) -> None:
    """Sets up the state of a parameter for optimizers that do so in their constructor, such as Adagrad."""
    if not optimizer.state or not any(
        optimizer.state.get(p) for p in group["params"] if p is not parameter
    ):
        return
    try:
        state = optimizer_like(optimizer, parameter, group).state
    except Exception:  # a class that cannot be instantiated again sets up its state in the step, or fails there
        return
    if parameter in state:
        optimizer.state[parameter] = state[parameter]
