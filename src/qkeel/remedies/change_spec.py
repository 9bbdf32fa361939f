"""Remedies that change what attention computes: another object in a slot of the site's spec."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping

from torch import nn

from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.core import SpecModule
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.join import join
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec

# Gains that are not the same for both halves of a rotated pair.
PER_DIM = ("dim", "one_plus_dim", "head_dim")


class ChangeSpec(Remedy):
    """Gives each site a new spec; parameters it needs live on the site's module and join the optimizer."""

    __slots__ = ()

    @abc.abstractmethod
    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        """The spec with this remedy in it."""

    def supports(self, site: AttentionSite) -> Refusal | None:
        if not isinstance(site.module, SpecModule):
            return Refusal("this attention has no spec to change", "build the model with qkeel.nn")
        return None

    def apply(self, target: Target) -> Handle:
        return compose_all(self._change(site, target) for site in target.sites)

    def _change(self, site: AttentionSite, target: Target) -> Handle:
        module = site.module
        assert isinstance(module, SpecModule)
        old, new = module.spec, self.changed(module.spec, target.train_length)
        slots = [f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(new, f.name)]
        before, like = dict(module._parameters), next(module.parameters())
        needed = new.init_params(site.n_heads, site.n_kv_heads, site.head_dim)
        added = {n: nn.Parameter(value.to(like)) for n, value in needed.items() if n not in before}
        head = f"{site.name}." if site.name else ""
        joined = join(target.optimizer, {head + n: p for n, p in added.items()}, like)
        dropped = {n: p for n, p in before.items() if n not in needed}
        _swap(module, dropped, added)
        module.spec = new

        def undo() -> None:
            # Slot by slot: another remedy may have changed another slot since, and stay.
            module.spec = module.spec.replace(**{name: getattr(old, name) for name in slots})
            _swap(module, added, dropped)
            now = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({n: now[n] for n in (*before, *now) if n in now})
            joined.remove()

        return Handle(undo)


def _swap(module: nn.Module, out: Mapping[str, nn.Parameter | None], into: Mapping[str, nn.Parameter | None]) -> None:
    for name, parameter in out.items():
        del module._parameters[name]
        if parameter is not None:
            parameter.grad = None  # out of reach of zero_grad, so an optimizer would step by it again and again
    module._parameters.update(into)


def refuse_norm(site: AttentionSite, *, per_dim: bool) -> Refusal | None:
    """Why q and k of a site cannot be normed, if so. `per_dim`: the norm treats a head's dimensions differently."""
    if is_normed(site):
        return Refusal("q and k are normed already", "remove that norm first, or leave it be")
    if per_dim and site.spec.position.order == "rotate_then_norm":
        return Refusal(
            "its norm would come after the rotation, and a mean or a gain per dimension there makes scores depend on "
            "more than the distance",
            "use kind=rms or l2 with gain none, scalar or head, or build the model with order='norm_then_rotate'",
        )
    return None
