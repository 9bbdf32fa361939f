"""Remedies that change what attention computes: another object in a slot of the site's spec."""

from __future__ import annotations

import abc

from torch import nn
from torch.optim import Optimizer

from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.nn.core import SpecModule
from qkeel.remedies.base import Remedy, Target
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec


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
        return compose([self._change(site, target) for site in target.sites])

    def _change(self, site: AttentionSite, target: Target) -> Handle:
        module = site.module
        assert isinstance(module, SpecModule)
        old_spec, old_params = module.spec, dict(module._parameters)
        spec = self.changed(old_spec, target.train_length)
        like = next(p for p in module.parameters())
        needed = spec.init_params(site.n_heads, site.n_kv_heads, site.head_dim)
        added = {
            name: nn.Parameter(value.to(dtype=like.dtype, device=like.device))
            for name, value in needed.items()
            if name not in old_params or old_params[name] is None or old_params[name].shape != value.shape  # type: ignore[union-attr]
        }
        module.spec = spec
        for name in [n for n in old_params if n not in needed]:
            del module._parameters[name]
        for name, value in added.items():
            module._parameters[name] = value
        group = _join(target.optimizer, target.model, site, list(added.values()))

        def undo() -> None:
            module.spec = old_spec
            module._parameters.clear()
            module._parameters.update(old_params)
            if group is not None and target.optimizer is not None:
                _leave(target.optimizer, group, list(added.values()))

        return Handle(undo)


def _join(
    optimizer: Optimizer | None, model: nn.Module, site: AttentionSite, added: list[nn.Parameter]
) -> dict[str, object] | None:
    """Put new parameters into the optimizer group of gains (1-D parameters) if there is one, else of W_q."""
    if optimizer is None or not added:
        return None
    flat = [g for g in optimizer.param_groups if g["params"] and all(p.ndim < 2 for p in g["params"])]
    w_q = model.get_parameter(site.query[0].parameter)
    homes = flat or [g for g in optimizer.param_groups if any(p is w_q for p in g["params"])]
    group = homes[0] if homes else optimizer.param_groups[0]
    group["params"].extend(added)
    return group


def _leave(optimizer: Optimizer, group: dict[str, object], added: list[nn.Parameter]) -> None:
    gone = {id(p) for p in added}
    params = group["params"]
    assert isinstance(params, list)
    params[:] = [p for p in params if id(p) not in gone]
    for p in added:
        optimizer.state.pop(p, None)
