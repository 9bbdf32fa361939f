"""Parameters that a remedy puts on a site's module, under plain names, and takes off again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.patching.module_tables import names_in_use, parameters_of, submodules_of
from qkeel.remedies.base import Target, inside, module_name
from qkeel.remedies.steps.join_optimizer import join
from qkeel.spec import AttentionSpec
from qkeel.spec.slot import Geometry


def change_parameters(
    target: Target, site: AttentionSite, old: AttentionSpec, new: AttentionSpec, geometry: Geometry
) -> Handle:
    """The parameters that a new spec needs, by plain names on the site's module and in the optimizer too, and no longer
    those that only the old one did; the handle takes them off."""
    sizes = (geometry.n_heads, geometry.n_kv_heads, geometry.head_dim)
    had, needed = old.init_params(*sizes), new.init_params(*sizes)
    values = {n: value for n, value in needed.items() if n not in had}
    module = site.module
    like = target.parameter(site.query[0].parameter) if site.terms else next(target.model.parameters())
    _check_free(site, values)
    added = {n: nn.Parameter(value.to(like)) for n, value in values.items()}
    dropped = {n: parameters_of(module)[n] for n in had if n not in needed}
    before = dict(parameters_of(module))
    joined = join(target.optimizer, {inside(module_name(site), n): p for n, p in added.items()}, like)
    _swap(module, dropped, added)

    def undo() -> None:
        _swap(module, added, dropped)
        now = dict(parameters_of(module))
        parameters_of(module).clear()
        parameters_of(module).update({n: now[n] for n in (*before, *now) if n in now})
        joined.remove()

    return Handle(undo)


def add_submodules(
    target: Target,
    site: AttentionSite,
    added: Mapping[str, nn.Module],
    near: Tensor,
    *,
    matrices: bool = False,
    over_identities: bool = False,
) -> Handle:
    """New parts of a site's module, by plain names, their parameters in the optimizer too (see `join`).

    Args:
        target: the model and its optimizer.
        site: where the parts go.
        added: the parts, by name.
        near: a parameter whose group of the optimizer the new parameters share.
        matrices: True if the new parameters are matrices (see `join`).
        over_identities: True if a part may take the place of an nn.Identity of its name, which the handle puts back.
    """
    module, name = site.module, module_name(site)
    held = submodules_of(module)
    identities = {part: held[part] for part in added if over_identities and type(held.get(part)) is nn.Identity}
    _check_free(site, [part for part in added if part not in identities])
    parameters = {inside(name, f"{part}.{n}"): p for part, new in added.items() for n, p in new.named_parameters()}
    joined = join(target.optimizer, parameters, near, matrices=matrices)
    for part, new in added.items():
        held[part] = new.train(module.training)

    def undo() -> None:
        for part in added:
            if part in identities:
                held[part] = identities[part]
            else:
                del held[part]
        for parameter in parameters.values():
            parameter.grad = None
        joined.remove()

    return Handle(undo)


def _check_free(site: AttentionSite, names: Iterable[str]) -> None:
    for name in names:
        if name in names_in_use(site.module):
            raise RefusedError(f"{module_name(site) or 'the model itself'} has something called {name} already")


def _swap(module: nn.Module, out: Mapping[str, nn.Parameter | None], into: Mapping[str, nn.Parameter | None]) -> None:
    for name, parameter in out.items():
        del parameters_of(module)[name]
        if parameter is not None:
            parameter.grad = None  # out of reach of zero_grad, so an optimizer would step by it again and again
    parameters_of(module).update(into)
