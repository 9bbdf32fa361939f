"""sigma_reparam: every linear layer's weight divided by its spectral norm, times a learned scalar."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkeel.errors import NonFiniteError, RefusedError, unknown
from qkeel.functional.norms import wide
from qkeel.handle import Handle
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.join import join


@final
class SpectralScale(nn.Module):
    """Ŵ = (γ/σ) W, v = W u/‖W u‖, u' = Wᵀ v/‖Wᵀ v‖, σ = vᵀ W u'; u is a buffer, u ← u' in training forwards.

    One step of power iteration per forward. v and u' carry no gradient, σ does. All in float32 or wider, autocast
    or not. u starts at W's first right singular vector.
    """

    def __init__(self, weight: Tensor, init: Literal["keep", "one"]) -> None:
        super().__init__()
        self.register_buffer("right", _top_right(weight.detach()))
        self.right: Tensor
        sigma = self._sigma(weight.detach())[0]
        # γ = σ exactly as the forward computes it, float32 or wider: γ/σ is 1, the weight the same bit for bit.
        self.gamma = nn.Parameter(sigma if init == "keep" else torch.ones_like(sigma))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight as it is used."""
        sigma, right = self._sigma(weight)
        if self.training:
            with torch.no_grad():
                self.right.copy_(right)
        return (self.gamma / sigma).to(weight.dtype) * weight

    def _sigma(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(weight.device.type, enabled=False):
            w = weight.to(wide(weight.dtype))
            with torch.no_grad():
                left = nn.functional.normalize(w @ self.right.to(w.dtype), dim=0)
                right = nn.functional.normalize(w.mT @ left, dim=0)
            return torch.dot(left, w @ right), right


def _top_right(weight: Tensor) -> Tensor:
    """The first right singular vector, from the smaller Gram matrix, in double precision."""
    w = weight.to(device="cpu", dtype=torch.float64)
    if w.shape[0] < w.shape[1]:
        vector = w.mT @ torch.linalg.eigh(w @ w.mT).eigenvectors[:, -1]
    else:
        vector = torch.linalg.eigh(w.mT @ w).eigenvectors[:, -1]
    return nn.functional.normalize(vector, dim=0).to(device=weight.device, dtype=wide(weight.dtype))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SigmaReparam(Remedy):
    """Ŵ = (γ/σ(W)) W for linear layers: all of them, or those of attention only (`on=attention`).

    init="keep" starts γ at σ(W), so nothing changes at first (the authors' vision code); "one" starts it at 1
    (the paper). γ joins the optimizer with its gains.
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
        inside = {id(m) for site in target.sites for m in site.module.modules()}
        layers = {
            name: m
            for name, m in target.model.named_modules()
            if isinstance(m, nn.Linear) and (self.on == "all" or id(m) in inside)
        }
        for name, layer in layers.items():
            _check(name, layer)
        return compose_all(self._changes(layers, target))

    def _changes(self, layers: dict[str, nn.Linear], target: Target) -> Iterator[Handle]:
        gains: dict[str, nn.Parameter] = {}
        weights = [layer.weight for layer in layers.values()]
        for name, layer in layers.items():
            scale, handle = _reparametrise(layer, self.init)
            head = f"{name}." if name else ""
            gains[f"{head}parametrizations.weight.0.gamma"] = scale.gamma
            yield handle
        if layers:
            yield join(target.optimizer, gains, weights[0])


def _check(name: str, layer: nn.Linear) -> None:
    weight = layer._parameters.get("weight")
    if weight is None:
        raise RefusedError(f"sigma_reparam: the weight of {name} is reparametrised already; remove that first")
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(f"sigma_reparam: the weight of {name} holds NaN or infinity; load sound weights")
    if not bool(weight.any()):
        raise RefusedError(
            f"sigma_reparam: the weight of {name} is all zeros, which has no direction to scale; start it at "
            "random, or leave it out with on=attention"
        )


def _reparametrise(layer: nn.Linear, init: Literal["keep", "one"]) -> tuple[SpectralScale, Handle]:
    weight, names = layer.weight, list(layer._parameters)
    cls, attributes = layer.__class__, set(layer.__dict__)
    scale = SpectralScale(weight, init)
    # "unsafe" leaves out a trial forward, which would be taken for one of training.
    parametrize.register_parametrization(layer, "weight", scale, unsafe=True)
    layer._modules["parametrizations"].train(layer.training)  # type: ignore[union-attr]

    def undo() -> None:
        del layer._modules["parametrizations"]
        layer.__class__ = cls
        for extra in set(layer.__dict__) - attributes:
            del layer.__dict__[extra]
        kept = {**layer._parameters, "weight": weight}
        layer._parameters.clear()
        layer._parameters.update({name: kept[name] for name in names})

    return scale, Handle(undo)
