"""σReparam: the weight of every linear layer is divided by its spectral norm and multiplied by a learned scalar."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkeel import dist
from qkeel.errors import NonFiniteError, RefusedError
from qkeel.functional.norms import wide
from qkeel.handle import Handle
from qkeel.patching.autograd import version_of
from qkeel.patching.modes import (
    parameters_of,
    pickle_by,
    put_first,
    recomputing,
    set_class,
    state_without,
    submodules_of,
)
from qkeel.remedies.base import Remedy, Target, compose_all, inside
from qkeel.remedies.head_steps import join


@final
class SpectralScale(nn.Module):
    """Ŵ = (γ/σ) W with v = W u/‖W u‖, u' = Wᵀ v/‖Wᵀ v‖ and σ = vᵀ W u'; u is a buffer, and u ← u' in training forwards.

    Each forward performs one step of power iteration. Gradients flow through σ, but not through v and u'. Everything is
    computed in float32 or wider, with or without autocast. u starts at W's first right singular vector. When gradient
    checkpointing recomputes a forward pass, the recomputation starts at the u of the original pass. This must be the
    last forward pass, so RefusedError is raised if a weight was used in several forward passes before the backward
    pass.
    """

    def __init__(self, weight: Tensor, init: Literal["keep", "one"]) -> None:
        super().__init__()
        self.register_buffer("right", _top_right(weight.detach()))
        self.right: Tensor
        self._started = self.right  # u at the start of the last forward
        self._forwards, self._version = 0, -1  # forwards with gradients since a backward; the weight's version in them
        sigma = self._sigma(weight.detach(), self.right)[0][None]  # one dimension, since fully_shard accepts no scalars
        # γ starts at σ exactly as the forward computes it, so γ/σ is 1 and the weight is unchanged bit for bit.
        self.gamma = nn.Parameter(sigma if init == "keep" else torch.ones_like(sigma))

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the weight that the layer uses."""
        again = self.training and not torch.compiler.is_compiling() and recomputing()
        if again and self._forwards > 1:
            raise RefusedError(
                f"sigma_reparam: gradient checkpointing recomputes a layer that ran {self._forwards} times before "
                "this backward pass, each time with a different vector. Call backward after each forward pass, or "
                "leave the layer out of checkpointing"
            )
        sigma, right = self._sigma(weight, self._started if again else self.right)
        if again:
            self._forwards = 0
        elif self.training:
            if not torch.compiler.is_compiling():
                self._note(weight)
            with torch.no_grad():
                self.right.copy_(right)
        return (self.gamma / sigma).to(weight.dtype) * weight

    def _note(self, weight: Tensor) -> None:
        self._started = self.right.clone()
        if torch.is_grad_enabled():
            self._forwards = self._forwards + 1 if version_of(weight) == self._version else 1
            self._version = version_of(weight)

    def _sigma(self, weight: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(weight.device.type, enabled=False):
            w = weight.to(wide(weight.dtype))
            with torch.no_grad():
                left = nn.functional.normalize(w @ start.to(w.dtype), dim=0)
                right = nn.functional.normalize(w.mT @ left, dim=0)
            return torch.dot(left, w @ right), right


def _top_right(weight: Tensor) -> Tensor:
    """Returns the first right singular vector, computed from the smaller Gram matrix in double precision."""
    w = weight.to(device="cpu", dtype=torch.float64)
    if w.shape[0] < w.shape[1]:
        vector = w.mT @ torch.linalg.eigh(w @ w.mT).eigenvectors[:, -1]
    else:
        vector = torch.linalg.eigh(w.mT @ w).eigenvectors[:, -1]
    return nn.functional.normalize(vector, dim=0).to(device=weight.device, dtype=wide(weight.dtype))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SigmaReparam(Remedy):
    """Ŵ = (γ/σ(W)) W for all linear layers, or only for those in attention (`on=attention`).

    With init="keep", γ starts at σ(W), so that nothing changes at first (as in the authors' vision code); with "one" it
    starts at 1 (as in the paper). γ is added to the optimizer in the same way as gains.
    """

    on: Literal["all", "attention"] = "all"
    init: Literal["keep", "one"] = "keep"

    name = "sigma_reparam"
    line = "divides each linear weight by its spectral norm and learns the scale"
    source = "Zhai et al. 2023, arXiv 2303.06296"
    rule = "linear layers ({on}): Ŵ = (γ / σ(W)) · W, σ the largest singular value, γ learned"

    def apply(self, target: Target) -> Handle:
        inside = {id(m) for site in target.sites for m in site.module.modules()}
        layers = {
            name: m
            for name, m in target.model.named_modules()
            if (self.on == "all" or id(m) in inside) and (isinstance(m, nn.Linear) or _multiplies(m))
        }
        for name, layer in layers.items():
            _check(name, layer)
        handle = compose_all(self._changes(layers, target))

        def undo() -> None:
            for name, layer in layers.items():
                if "parametrizations" in submodules_of(layer) and dist.is_split(_stored(layer)):
                    raise RefusedError(
                        f"sigma_reparam: the weight of {name} was split across processes after the remedy was applied, "
                        "and the code that splits it uses its current name. Remove the remedy before the model is split"
                    )
            handle.remove()

        return Handle(undo)

    def _changes(self, layers: dict[str, nn.Module], target: Target) -> Iterator[Handle]:
        gains: dict[str, nn.Parameter] = {}
        weights = [layer.get_parameter("weight") for layer in layers.values()]
        for name, layer in layers.items():
            scale, handle = _reparametrise(layer, self.init)
            gains[inside(name, "parametrizations.weight.0.gamma")] = scale.gamma
            yield handle
        if layers:
            yield join(target.optimizer, gains, weights[0])


def _check(name: str, layer: nn.Module) -> None:
    weight = parameters_of(layer).get("weight")
    if weight is None:
        raise RefusedError(
            f"sigma_reparam: the weight of {name} is already reparametrised; remove that parametrisation first"
        )
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(f"sigma_reparam: the weight of {name} holds NaN or infinity; load finite weights")
    if not bool(weight.any()):
        raise RefusedError(
            f"sigma_reparam: the weight of {name} is all zeros, so it has no direction to scale; initialise "
            "it randomly, or leave it out with on=attention"
        )


def _multiplies(module: nn.Module) -> bool:
    """True if a module other than nn.Linear computes x W + b (transformers' Conv1D), tested on two random rows."""
    weight, bias = (parameters_of(module).get(name) for name in ("weight", "bias"))
    names = {name for name, p in parameters_of(module).items() if p is not None}
    if weight is None or weight.ndim != 2 or not names <= {"weight", "bias"} or any(module.children()):
        return False
    if isinstance(module, nn.Embedding) or weight.is_meta or not weight.is_floating_point():
        return False
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, weight.shape[0], generator=rng).to(weight)
    try:
        with torch.no_grad():
            got, want = module(x), x @ weight if bias is None else torch.addmm(bias, x, weight)
    except Exception:  # the module takes other inputs
        return False
    return isinstance(got, Tensor) and got.shape == want.shape and bool(torch.allclose(got, want, rtol=1e-3, atol=1e-4))


def _reparametrise(layer: nn.Module, init: Literal["keep", "one"]) -> tuple[SpectralScale, Handle]:
    weight, names = layer.get_parameter("weight"), list(parameters_of(layer))
    cls, attributes = layer.__class__, set(layer.__dict__)
    scale = SpectralScale(weight, init)
    _register(layer, scale)

    def undo() -> None:
        trained = _stored(layer)
        del submodules_of(layer)["parametrizations"]
        set_class(layer, cls)
        for extra in set(layer.__dict__) - attributes:
            del layer.__dict__[extra]
        kept = {**parameters_of(layer), "weight": trained}
        parameters_of(layer).clear()
        parameters_of(layer).update({name: kept[name] for name in names})

    return scale, Handle(undo)


def _stored(layer: nn.Module) -> nn.Parameter:
    """Returns the trained weight of a reparametrised layer."""
    return layer.get_submodule("parametrizations.weight").get_parameter("original")


def _register(layer: nn.Module, scale: SpectralScale) -> None:
    # "unsafe" skips a trial forward, which would count as a training forward.
    parametrize.register_parametrization(layer, "weight", scale, unsafe=True)
    layer.get_submodule("parametrizations").train(layer.training)
    pickle_by(layer, _reduced)


def _reduced(layer: nn.Module, protocol: object) -> tuple[object, ...]:
    """Pickles a layer as its original class, its stored weight and its scale."""
    state = state_without(layer, "parametrizations")
    weights = layer.get_submodule("parametrizations.weight")
    kept = weights.get_parameter("original"), weights.get_submodule("0")
    return _restored, (layer.__class__.__bases__[0], state, *kept)


def _restored(cls: type[nn.Module], state: dict[str, object], weight: nn.Parameter, scale: SpectralScale) -> nn.Module:
    layer = object.__new__(cls)
    layer.__dict__.update(state)
    put_first(layer, "weight", weight)
    _register(layer, scale)
    return layer


@torch.no_grad()
def folded(layer: nn.Module) -> bool:
    """Writes Ŵ, as computed in evaluation mode, into the stored weight and makes the layer an ordinary one again.

    Returns False for other layers."""
    try:
        found = layer.get_submodule("parametrizations.weight")
    except AttributeError:
        return False
    if not isinstance(found, parametrize.ParametrizationList) or not isinstance(found[0], SpectralScale):
        return False
    training = found.training
    found.eval()
    value = found()
    found.train(training)
    weight = found.get_parameter("original")
    weight.copy_(value)
    del submodules_of(layer)["parametrizations"]
    set_class(layer, layer.__class__.__bases__[0])
    put_first(layer, "weight", weight)
    return True
