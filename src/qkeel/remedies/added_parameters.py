"""Adds the new parameters of a remedy (gains, scales, gates) to modules and to the optimizer, and removes them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.patching.module_tables import names_in_use, parameters_of, submodules_of
from qkeel.patching.sharded_models import shard_alike
from qkeel.remedies.base import Target, inside, module_name
from qkeel.remedies.optimizer_trials import ParamGroup, optimizer_like
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec
from qkeel.spec.slot import ParameterSizes


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
    # Muon and others keep gains and biases in groups of their own, without decay.
    flat = [
        g
        for g in optimizer.param_groups
        if g["params"] and all(p.ndim < 2 for p in g["params"])
    ]
    # The weight that the new parameters stand beside may be in any group, or held by nobody.
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


def change_parameters(
    target: Target,
    site: AttentionSite,
    old: AttentionSpec,
    new: AttentionSpec,
    geometry: ParameterSizes,
) -> Handle:
    """Adds parameters that only the new spec needs to the site's module and the optimizer.

    Parameters that only the old spec needs are dropped. The handle restores the previous parameters.
    """
    sizes = (geometry.n_heads, geometry.n_kv_heads, geometry.head_dim)
    had, needed = old.init_params(*sizes), new.init_params(*sizes)
    values = {n: value for n, value in needed.items() if n not in had}
    module = site.module
    near = (
        target.parameter(site.query[0].parameter)
        if site.terms
        else next(target.model.parameters())
    )
    _check_free(site, values)
    added = {n: nn.Parameter(value.to(near)) for n, value in values.items()}
    held = parameters_of(module)
    order = list(held)
    # A learned scale that the norm's own replaces, say.
    dropped = {n: held.pop(n) for n in had if n not in needed}
    held.update(added)
    joined = join(
        target.optimizer,
        {inside(module_name(site), n): p for n, p in added.items()},
        near,
    )
    _forget_gradients(dropped)

    def undo() -> None:
        # Other remedies may have added or dropped parameters since.
        kept = {n: p for n, p in held.items() if n not in added} | dropped
        held.clear()
        held.update({n: kept[n] for n in (*order, *kept) if n in kept})
        _forget_gradients(added)
        joined.remove()

    return Handle(undo)


def _forget_gradients(parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Drops the gradients of parameters that left the model: zero_grad no longer reaches them, so an optimizer would
    apply them in every step."""
    for parameter in parameters.values():
        if parameter is not None:
            parameter.grad = None


def add_submodules(
    target: Target,
    site: AttentionSite,
    added: Mapping[str, nn.Module],
    near: Tensor,
    *,
    matrices: bool = False,
) -> Handle:
    """Adds submodules to a site's module, and their parameters to the optimizer (see `join`).

    If the module's weights are under fully_shard, it is applied to the submodules too.

    Args:
        target: the model and its optimizer.
        site: the attention to whose module the submodules are added.
        added: the submodules, keyed by name.
        near: an existing parameter that determines the optimizer group of the new ones (see `join`).
        matrices: True if the new parameters are matrices (see `join`).
    """
    module, name = site.module, module_name(site)
    held = submodules_of(module)
    _check_free(site, added)
    for new in added.values():
        # Before the optimizer sees them: fully_shard replaces parameters by shards.
        shard_alike(target.model, new, near)
    parameters = {
        inside(name, f"{child}.{n}"): p
        for child, new in added.items()
        for n, p in new.named_parameters()
    }
    joined = join(target.optimizer, parameters, near, matrices=matrices)
    for child, new in added.items():
        held[child] = new.train(module.training)

    def undo() -> None:
        for child in added:
            del held[child]
        _forget_gradients(parameters)
        joined.remove()

    return Handle(undo)


def _check_free(site: AttentionSite, names: Iterable[str]) -> None:
    for name in names:
        if name in names_in_use(site.module):
            raise RefusedError(
                f"{module_name(site) or 'the model itself'} already has an attribute {name}"
            )
