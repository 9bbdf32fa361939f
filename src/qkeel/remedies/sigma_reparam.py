"""sigma_reparam: every linear layer's weight divided by its spectral norm, times a learned scalar."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkeel.errors import unknown
from qkeel.handle import Handle, compose
from qkeel.remedies.base import Remedy, Target


class SpectralScale(nn.Module):
    """Ŵ = γ W / σ(W), σ by one power-iteration step per training forward; its vector is a buffer."""

    def __init__(self, weight: Tensor, init: str) -> None:
        super().__init__()
        _, s, vh = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        self.register_buffer("right", vh[0].to(weight.dtype))
        self.gamma = nn.Parameter((s[0] if init == "keep" else torch.ones(())).to(weight))
        self.right: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        """The reparametrised weight."""
        with torch.no_grad():
            left = nn.functional.normalize(weight @ self.right, dim=0)
            right = nn.functional.normalize(weight.mT @ left, dim=0)
            if self.training:
                self.right.copy_(right)
        sigma = torch.dot(left, weight @ right)
        return self.gamma / sigma * weight


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SigmaReparam(Remedy):
    """Ŵ = (γ/σ(W)) W for linear layers: all of them, or those of attention only (`on=attention`).

    init="keep" starts γ at σ(W), so nothing changes at first (the authors' vision code); "one" starts it at 1
    (the paper).
    """

    on: Literal["all", "attention"] = "all"
    init: Literal["keep", "one"] = "keep"

    name = "sigma_reparam"
    line = "divides each linear weight by its spectral norm and learns the scale"
    source = "Zhai et al. 2023, arXiv 2303.06296"

    def __post_init__(self) -> None:
        if self.on not in ("all", "attention"):
            raise unknown("extent of sigma_reparam", self.on, ("all", "attention"))
        if self.init not in ("keep", "one"):
            raise unknown("init of sigma_reparam", self.init, ("keep", "one"))

    def apply(self, target: Target) -> Handle:
        inside = [m for site in target.sites for m in site.module.modules()]
        pool = list(target.model.modules()) if self.on == "all" else inside
        layers = [m for m in dict.fromkeys(pool) if isinstance(m, nn.Linear)]
        return compose([_reparametrise(layer, self.init, target) for layer in layers])


def _reparametrise(layer: nn.Linear, init: str, target: Target) -> Handle:
    weight, names = layer.weight, list(layer._parameters)
    cls, attributes = layer.__class__, set(layer.__dict__)
    scale = SpectralScale(weight, init)
    parametrize.register_parametrization(layer, "weight", scale)
    if target.optimizer is not None:
        target.optimizer.add_param_group({**_options(target.optimizer), "params": [scale.gamma]})

    def undo() -> None:
        del layer._modules["parametrizations"]
        layer.__class__ = cls
        for extra in set(layer.__dict__) - attributes:
            del layer.__dict__[extra]
        kept = dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters.update({name: weight if name == "weight" else kept[name] for name in names})
        if target.optimizer is not None:
            groups = target.optimizer.param_groups
            groups[:] = [g for g in groups if not any(p is scale.gamma for p in g["params"])]
            target.optimizer.state.pop(scale.gamma, None)

    return Handle(undo)


def _options(optimizer: Any) -> dict[str, Any]:
    """The first group's options without weight decay, which would pull γ to 0."""
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return {**options, **({"weight_decay": 0.0} if "weight_decay" in options else {})}
