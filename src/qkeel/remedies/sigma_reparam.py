"""σReparam: the weight of every linear layer is divided by its spectral norm and multiplied by a learned scalar."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkeel import distributed as dist
from qkeel.errors import NonFiniteError, RefusedError
from qkeel.functional.norms import wide
from qkeel.handle import Handle, compose
from qkeel.patching.autograd import is_wrapper
from qkeel.patching.module_tables import (
    parameters_of,
    pickle_by,
    put_first,
    set_class,
    state_without,
    submodules_of,
)
from qkeel.patching.torch_state import recomputing
from qkeel.remedies.added_parameters import join
from qkeel.remedies.base import Remedy, Target, compose_all, inside


@final
class SpectralScale(nn.Module):
    """Ŵ = (γ/σ) W with v = W u/‖W u‖, u' = Wᵀ v/‖Wᵀ v‖ and σ = vᵀ W u'; u is a buffer.

    One step of power iteration is made before each training forward of the model (`PowerIteration`): it sets u ← u' and
    keeps v, and all reads of the weight in this pass use these two, as does a pass that gradient checkpointing repeats.
    In evaluation mode, v and u' are computed from u at each read, and nothing is stored. Gradients flow through σ, but
    not through v and u'. Everything is computed and stored in float32 or wider, with or without autocast, even after
    `model.to(torch.bfloat16)`. u starts at W's first right singular vector.
    """

    def __init__(self, weight: Tensor, init: Literal["keep", "one"]) -> None:
        super().__init__()
        self.right: Tensor
        self.pass_left: Tensor
        self.pass_right: Tensor
        self.register_buffer("right", _top_right(weight.detach()))
        left, right = _power_step(weight.detach(), self.right)
        # v and u' of the current pass. A checkpoint does without them, because the next training forward begins with
        # computing them from u.
        self.register_buffer("pass_left", left, persistent=False)
        self.register_buffer("pass_right", right.clone(), persistent=False)
        # One dimension, since fully_shard accepts no scalars.
        sigma = _sigma(weight.detach(), left, right)[None]
        # γ starts at σ exactly as the forward computes it, so γ/σ is 1 and the weight is unchanged bit for bit.
        gamma = sigma if init == "keep" else torch.ones_like(sigma)
        # Γ would train a frozen layer.
        self.gamma = nn.Parameter(gamma, requires_grad=weight.requires_grad)

    def iterate(self, weight: Tensor) -> None:
        """Makes one step of power iteration, at the start of a training forward."""
        left, right = _power_step(weight, self.right)
        for buffer, vector in (
            (self.pass_left, left),
            (self.pass_right, right),
            (self.right, right),
        ):
            buffer.copy_(vector)

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the weight that the layer uses."""
        if self.training:
            # Copies, because another forward may overwrite the buffers before this one's backward.
            left, right = self.pass_left.clone(), self.pass_right.clone()
        else:
            left, right = _power_step(weight, self.right)
        return (self.gamma / _sigma(weight, left, right)).to(weight.dtype) * weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.to(torch.bfloat16) would leave γ/σ with three digits.
        def converted(x: Tensor) -> Tensor:
            y = fn(x)
            return y if wide(y.dtype) == y.dtype else x.to(y.device)

        return super()._apply(converted, recurse)


@torch.no_grad()
def _power_step(weight: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns v and u' for a start u."""
    with torch.autocast(weight.device.type, enabled=False):
        w = weight.to(wide(weight.dtype))
        left = nn.functional.normalize(w @ start.to(w.dtype), dim=0)
        return left, nn.functional.normalize(w.mT @ left, dim=0)


def _sigma(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        w = weight.to(wide(weight.dtype))
        return torch.dot(left.to(w.dtype), w @ right.to(w.dtype))


@final
class PowerIteration:
    """Hooks of the model and of its layers, which make one step of power iteration in each layer in training.

    It is made before the forward of the model, so that a pass that gradient checkpointing repeats in the backward sees
    the same vectors; where the whole model is repeated, the hook runs again and changes nothing. A layer that runs
    outside a pass of the model, as where a program calls a submodule, makes its step itself. A copy of the model has
    hooks on its own layers.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = list(layers)
        self.is_in_pass = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PowerIteration:
        # A copy of a layer, made while the model runs, runs outside that pass.
        # Entered before the layers are copied, because their hooks refer to it.
        memo[id(self)] = copied = PowerIteration(())
        copied.layers = copy.deepcopy(self.layers, memo)
        return copied

    def register(self, model: nn.Module) -> Handle:
        """Adds the hooks."""
        hooks = [
            model.register_forward_pre_hook(self.before_pass),
            model.register_forward_hook(self.after_pass),
            *(
                layer.register_forward_pre_hook(self.before_layer)
                for layer in self.layers
                if layer is not model
            ),
        ]
        return compose(Handle(hook.remove) for hook in hooks)

    def before_pass(self, model: nn.Module, _: object) -> None:
        """Makes the step of all layers."""
        # The compiler cannot trace the question of whether a backward pass runs, and a compiled forward is not repeated
        # through this hook.
        if not model.training or (not torch.compiler.is_compiling() and recomputing()):
            return
        if not torch.compiler.is_compiling():
            self.is_in_pass = True
        for layer in self.layers:
            _iterate(layer)

    def after_pass(self, *_: object) -> None:
        """Notes the end of a pass."""
        if not torch.compiler.is_compiling():
            self.is_in_pass = False

    def before_layer(self, layer: nn.Module, _: object) -> None:
        """Makes the step of a layer that runs outside a pass of the model."""
        if (
            layer.training
            and not torch.compiler.is_compiling()
            and not self.is_in_pass
            and not recomputing()
        ):
            _iterate(layer)


def _iterate(layer: nn.Module) -> None:
    weights = stored(layer)
    for name, scale in _scales(layer).items():
        if scale.training:
            # Between passes, fully_shard keeps only a part of the weight on each process.
            scale.iterate(dist.whole(weights[name].detach()))


def _top_right(weight: Tensor) -> Tensor:
    """Returns the first right singular vector, computed from the smaller Gram matrix in double precision."""
    # Once, at `apply`: in float32 the smaller Gram matrix would lose half of the digits.
    w = weight.to(device="cpu", dtype=torch.float64)
    if w.shape[0] < w.shape[1]:
        vector = w.mT @ torch.linalg.eigh(w @ w.mT).eigenvectors[:, -1]
    else:
        vector = torch.linalg.eigh(w.mT @ w).eigenvectors[:, -1]
    return nn.functional.normalize(vector, dim=0).to(
        device=weight.device, dtype=wide(weight.dtype)
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SigmaReparam(Remedy):
    """Ŵ = (γ/σ(W)) W for all linear layers and the projections of nn.MultiheadAttention, or only for those in attention
    (`on=attention`). A weight from which q, k and v are computed together is one W.

    With init="keep", γ starts at σ(W), so that nothing changes at first (as in the authors' vision code); with "one" it
    starts at 1 (as in the paper). γ is added to the optimizer in the same way as gains. The γ of a frozen weight is
    frozen.

    Where gradient checkpointing repeats passes, call backward after each forward of the model: a repeated pass uses the
    σ of the last forward.
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
            name: (m, weights)
            for name, m in target.model.named_modules()
            if (self.on == "all" or id(m) in inside) and (weights := _weights_of(m))
        }
        for name, (layer, weights) in layers.items():
            for weight in weights:
                _check(name, layer, weight)
        _check_logits(
            target,
            {
                id(p)
                for layer, weights in layers.values()
                for p in map(layer.get_parameter, weights)
            },
        )
        handle = compose_all(self._changes(layers, target))

        def undo() -> None:
            for name, (layer, _) in layers.items():
                if any(map(dist.is_split, stored(layer).values())):
                    raise RefusedError(
                        f"sigma_reparam: the weight of {name} was split across processes after the remedy was applied, "
                        "and the code that splits it uses its current name. Remove the remedy before the model is split"
                    )
            handle.remove()

        return Handle(undo)

    def _changes(
        self, layers: Mapping[str, tuple[nn.Module, list[str]]], target: Target
    ) -> Iterator[Handle]:
        gains: dict[str, nn.Parameter] = {}
        near = [layer.get_parameter(weights[0]) for layer, weights in layers.values()]
        groups = [] if target.optimizer is None else target.optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        for name, (layer, weights) in layers.items():
            scales, handle = _reparametrise(layer, weights, self.init)
            for weight, scale in scales.items():
                # An optimizer that holds a frozen weight would train it once it is unfrozen, and so it must γ.
                if scale.gamma.requires_grad or id(stored(layer)[weight]) in held:
                    gains[inside(name, f"parametrizations.{weight}.0.gamma")] = (
                        scale.gamma
                    )
            yield handle
        if layers:
            yield PowerIteration(layer for layer, _ in layers.values()).register(
                target.model
            )
            yield join(target.optimizer, gains, near[0])


# One weight for q, k and v, or one each.
_MHA_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def _weights_of(module: nn.Module) -> list[str]:
    """Returns the names of the parameters with which a module multiplies its input, or [] if it does not."""
    if isinstance(module, nn.MultiheadAttention):
        parameters = parameters_of(module)
        return [name for name in _MHA_WEIGHTS if parameters.get(name) is not None]
    # transformers' Conv1D, of GPT-2, computes x W + b.
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return ["weight"] if is_linear else []


def _check(name: str, layer: nn.Module, parameter: str) -> None:
    weight = parameters_of(layer).get(parameter)
    if weight is None:
        raise RefusedError(
            f"sigma_reparam: {parameter} of {name} is already reparametrised; remove that parametrisation first"
        )
    if is_wrapper(dist.local(weight)) or not weight.is_floating_point():
        raise RefusedError(
            f"sigma_reparam: {parameter} of {name} is quantised ({type(weight).__name__}), and no norm of it can be "
            "learned; apply it to a model that is not quantised, or use softcap, which needs no weights"
        )
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(
            f"sigma_reparam: {parameter} of {name} holds NaN or infinity; load finite weights"
        )
    if not bool(weight.any()):
        raise RefusedError(
            f"sigma_reparam: {parameter} of {name} is all zeros, so it has no direction to scale; initialise "
            "it randomly, or leave it out with on=attention"
        )


def _check_logits(target: Target, covered: set[int]) -> None:
    """Raises RefusedError if logits are computed from a matrix that the remedy would leave as it is."""
    for s in target.logit_slices():
        weight = target.parameter(s.parameter)
        if weight.ndim > 1 and id(weight) not in covered:
            raise RefusedError(
                "sigma_reparam: expected all logits to be computed by nn.Linear, nn.MultiheadAttention or layers that "
                f"compute x·W, but some are computed from {s.parameter} {list(weight.shape)}, which the remedy "
                "would leave as it is. Compute this product in an nn.Linear, or use a remedy that changes q and k or "
                "the logits (qk_norm, softcap)"
            )


def _reparametrise(
    layer: nn.Module, weights: list[str], init: Literal["keep", "one"]
) -> tuple[dict[str, SpectralScale], Handle]:
    # state_dict and optimizers count parameters in this order.
    names = list(parameters_of(layer))
    cls, attributes = layer.__class__, set(layer.__dict__)
    scales = {
        weight: SpectralScale(layer.get_parameter(weight), init) for weight in weights
    }
    _register(layer, scales)

    def undo() -> None:
        trained = stored(layer)
        # `fold_layer` has made it an ordinary layer.
        if not trained:
            return
        del submodules_of(layer)["parametrizations"]
        set_class(layer, cls)
        for extra in set(layer.__dict__) - attributes:
            del layer.__dict__[extra]
        kept = {**parameters_of(layer), **trained}
        parameters_of(layer).clear()
        parameters_of(layer).update({name: kept[name] for name in names})

    return scales, Handle(undo)


def _scales(layer: nn.Module) -> dict[str, SpectralScale]:
    """Returns the scales of a layer's weights under the remedy, by name of the weight; {} for other layers."""
    container = submodules_of(layer).get("parametrizations")
    if container is None:
        return {}
    scales = {}
    for name, entry in container.named_children():
        scale = submodules_of(entry).get("0")
        if isinstance(scale, SpectralScale):
            scales[name] = scale
    return scales


def stored(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained weights of a layer under the remedy, by name; {} for other layers."""
    weights: dict[str, Any] = {}
    for name in _scales(layer):
        # In torch.func.functional_call a plain tensor stands for the parameter, which get_parameter refuses.
        held = parameters_of(layer.get_submodule(f"parametrizations.{name}"))
        weights[name] = held["original"]
    return weights


def _register(layer: nn.Module, scales: Mapping[str, SpectralScale]) -> None:
    for weight, scale in scales.items():
        # "unsafe" skips a trial forward, which would count as a training forward.
        parametrize.register_parametrization(layer, weight, scale, unsafe=True)
    layer.get_submodule("parametrizations").train(layer.training)
    pickle_by(layer, _reduced)


def _reduced(layer: nn.Module, protocol: object) -> tuple[object, ...]:
    """Pickles a layer as its original class, its stored weights and their scales."""
    state = state_without(layer, "parametrizations")
    return _restored, (
        layer.__class__.__bases__[0],
        state,
        stored(layer),
        _scales(layer),
    )


def _restored(
    cls: type[nn.Module], state: dict[str, object], weights: Any, scales: Any
) -> nn.Module:
    layer = object.__new__(cls)
    layer.__dict__.update(state)
    _put_back(layer, weights)
    _register(layer, scales)
    return layer


def _put_back(layer: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Makes these weights the first parameters of the layer, in this order."""
    for name, weight in reversed([*weights.items()]):
        put_first(layer, name, weight)


@torch.no_grad()
def fold_layer(layer: nn.Module) -> None:
    """Writes Ŵ, as computed in evaluation mode, into the stored weights and makes the layer an ordinary one again."""
    weights = stored(layer)
    for name, scale in _scales(layer).items():
        training = scale.training
        weights[name].copy_(scale.eval()(weights[name]))
        scale.train(training)
    del submodules_of(layer)["parametrizations"]
    set_class(layer, layer.__class__.__bases__[0])
    _put_back(layer, weights)
