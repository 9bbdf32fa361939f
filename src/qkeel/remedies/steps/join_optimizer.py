"""New parameters of a remedy (gains, scales) join the optimizer, and leave it again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.remedies.steps.linearity import ParamGroup, probe_optimizer


def join(
    optimizer: Optimizer | None, added: Mapping[str, nn.Parameter], near: Tensor, *, matrices: bool = False
) -> Handle:
    """Put parameters (by qualified name) into an optimizer group; the handle takes them out, state included.

    They go where the optimizer has its other gains: the first group of vectors and scalars only; if there is none,
    the group of `near`. So they are decayed as its gains are, and a scheduler made earlier drives them too. `matrices`
    are weights like `near`, and go to its group.
    """
    if optimizer is None or not added:
        return Handle(lambda: None)
    if isinstance(optimizer, torch.optim.Muon) and not matrices:
        raise RefusedError(
            f"torch's Muon takes matrices only, and {', '.join(added)} are gains; give the optimizer that holds the "
            "model's norms instead"
        )
    flat = [g for g in optimizer.param_groups if g["params"] and all(p.ndim < 2 for p in g["params"])]
    homes = (flat if not matrices else []) or [g for g in optimizer.param_groups if any(p is near for p in g["params"])]
    group = homes[0] if homes else optimizer.param_groups[0]
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


def _start_state(optimizer: Optimizer, parameter: nn.Parameter, group: ParamGroup) -> None:
    """Some optimizers (Adagrad) set their state up when they are made, not in the first step."""
    if not any(optimizer.state.get(p) for p in group["params"] if p is not parameter):
        return
    try:
        state = probe_optimizer(optimizer, parameter, group).state
    except Exception:  # a class of its own making sets up its state by itself
        return
    if parameter in state:
        optimizer.state[parameter] = state[parameter]
