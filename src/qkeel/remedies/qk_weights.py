"""Remedies on the weights of queries and keys: rates, decays, spectral caps, and σReparam."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import NonFiniteError, RefusedError
from qkeel.functional.bounds import spectral_norm
from qkeel.functional.norms import wide
from qkeel.handle import Handle, compose
from qkeel.heads.site import HeadSlice, NormGain
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
from qkeel.patching.optimizers import before_change, go_first, in_real_steps
from qkeel.remedies.base import Remedy, Target, compose_all, inside
from qkeel.remedies.head_groups import HeadGroups, factor_per_row, views_by_tensor
from qkeel.remedies.head_steps import DecayFactors, check_changes_last, head_steps, join
from qkeel.remedies.head_weights import (
    HeadWeights,
    ReplacementCheck,
    StepRemedy,
    check_whole,
    found_inf,
    innermost,
    stepped,
)

# Remedies on the weights of queries and keys in a step: a smaller rate, none, a decay, a cap on the spectral norm.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKLearningRate(StepRemedy):
    """Makes steps of query and key weights, not of biases, `factor` times as long; 0 freezes them."""

    factor: float = 0.1

    name, may_be_zero = "qk_lr", ("factor",)
    line = "a fixed, smaller learning rate for query and key weights"
    source = "the ablation of Anson & Aitchison 2025, arXiv 2511.21377, figure 1"
    rule = "each step: lr(W_Q) = lr(W_K) = {factor} · η, η the optimizer's rate"

    def apply(self, target: Target) -> Handle:
        steps = head_steps(target, self.name, HeadWeights.of(target))
        return steps.scale(lambda ones: ones * self.factor)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenQK(StepRemedy):
    """Freezes everything that queries and keys are made of: weights, biases, and gains of norms on q and k.

    The control of a comparison: a run's gain over it is due to training queries and keys. After each step the rows are
    restored bit for bit, whatever the optimizer and its weight decay did to them; their gradients still count in the
    global norm of gradient clipping, so the other weights take the steps of a run without the remedy. A learned scale
    or temperature of the logits is trained. Rows that a step made infinite or NaN are not repaired: a run with such a
    step has diverged.
    """

    name = "frozen_qk"
    line = "leaves the weights, biases and gains of queries and keys as they are: the control of a comparison"
    source = "the control of a comparison; random attention as in Tay et al. 2021, arXiv 2005.00743"
    rule = "each step: W_Q, W_K, their biases and the gains of norms on q and k stay as they were"

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        weights = HeadWeights.of(target)
        slices, tensors = [*weights.slices], weights.of_optimizer(optimizer, self.name)
        for extra in _biases_and_gains(target):
            slices.append(extra)
            tensors.append(stepped(optimizer, target.parameter(extra.parameter)))
        views = [view for _, _, own in views_by_tensor(tensors, slices) for view in own]
        replaced = ReplacementCheck(target.model, self.name, dict.fromkeys(s.parameter for s in slices))
        counts = [s.n for s in slices]
        groups = HeadGroups(lambda view: view.places(counts))
        pairs = [(view, view.weight) for view in views]
        kept: list[Tensor] = []  # 0 for every head, and a 1 for rows of nobody

        @torch.no_grad()
        def before(_: Optimizer) -> None:
            replaced.check()
            groups.update(pairs)
            for group in groups.all:
                group.copy(None)

        @torch.no_grad()
        def after(*_: object) -> None:
            if not kept:
                kept.append(torch.tensor([*[0.0] * sum(counts), 1.0], device=views[0].weight.device))
            for group in groups.all:
                group.interpolate(kept[0])

        first = optimizer.register_step_pre_hook(in_real_steps(before_change(before)))
        last = optimizer.register_step_post_hook(in_real_steps(after))
        go_first(last)
        return compose(map(Handle, (last.remove, first.remove)))


def _biases_and_gains(target: Target) -> Iterator[HeadSlice]:
    """Returns the biases of query and key weights, and the gains and biases of norms on q and k, each once."""
    gains = (gain for site in target.sites for gain in (*site.query_gains, *site.key_gains))
    biases = (bias for s in target.logit_slices() if (bias := s.bias_of()) is not None)
    found: list[HeadSlice] = []
    for s in (*biases, *(part for gain in gains for part in _of_gain(target, gain))):
        if not any(s.parameter == f.parameter and s.same(f) for f in found):
            found.append(s)
    return iter(found)


def _of_gain(target: Target, gain: NormGain) -> Iterator[HeadSlice]:
    """Returns the rows of a norm's gain and bias as one head, all of which are frozen."""
    for name, index in ((gain.parameter, gain.index), (gain.bias, gain.bias_index)):
        if name is not None and index is not None:
            p = target.parameter(name)
            yield HeadSlice(parameter=name, axis=0, index=(index // max(1, p[0].numel())).unique()[None])


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKWeightDecay(StepRemedy):
    """Decays w ← (1 - η·λ)·w before the optimizer's own step, for every row of a query or key weight; η is its rate.

    Biases, norms' gains and, in a fused projection, the rows of values are not decayed. This decay is added to the
    optimizer's own. With AdamW(weight_decay=0) it equals AdamW(weight_decay=λ) for these weights up to rounding, and
    any other optimizer gets the same decay. `lalr` and `qk_lr` do not scale it. A weight without a gradient is not
    decayed, and no weight is in a step that a GradScaler skips.
    """

    decay: float = 0.1  #: λ

    name, may_be_zero = "qk_weight_decay", ("decay",)
    line = "decoupled weight decay for query and key weights only"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2, on part of the weights"
    rule = "before each step: W_Q ← (1 - {decay} · η) · W_Q, W_K ← (1 - {decay} · η) · W_K, η the optimizer's rate"

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        weights = HeadWeights.of(target)
        tensors = weights.in_full_precision(optimizer, self.name, "shrinks weights by a few parts in ten thousand")
        check_changes_last(optimizer, self.name, tensors)
        replaced = ReplacementCheck(target.model, self.name, weights.names)
        views = [view for _, _, own in views_by_tensor(tensors, weights.slices) for view in own]
        stepped = [(view, view.weight) for view in views]
        groups = HeadGroups(lambda view: view.places(weights.counts))
        decay = DecayFactors(optimizer, tensors, weights.counts, lambda group: group["lr"] * self.decay)
        dtype = functools.reduce(torch.promote_types, (view.weight.dtype for view in views))

        @torch.no_grad()
        def before(_: Optimizer) -> None:
            replaced.check()
            groups.update(stepped)
            decay.read(dtype, views[0].weight.device)
            row = decay.row(lambda w: w.grad is not None, found_inf(optimizer))
            for group in groups.all:
                group.scale(row)

        hook = optimizer.register_step_pre_hook(in_real_steps(before_change(before)))
        go_first(hook)  # before lalr and qk_lr read weights: they scale the optimizer's step
        return Handle(hook.remove)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpectralCap(StepRemedy):
    """W^h ← W^h · min(1, cap/σ(W^h)) after every optimizer step, for each query and key weight.

    Then |logit| ≤ scale · cap² · ‖x_i‖ ‖x_j‖ with one matrix on each side (biases aside). σ is exact, from the smaller
    Gram matrix of a head's rows (per=head) or of all of them (per=matrix). Weights under the cap stay unchanged bit for
    bit; a step that a GradScaler skipped changes nothing.

    Source: Newhouse et al. 2025, arXiv 2507.13338, who cap the weights' singular values after each step; here the whole
    block is rescaled instead of its largest singular values alone, which keeps the directions a head attends along, and
    only q and k are capped. Yoshida & Miyato 2017, arXiv 1705.10941, penalise σ in the loss.
    """

    cap: float = 4.0  #: largest σ of a head's weight, above 0
    per: Literal["head", "matrix"] = "head"

    name, stacks = "spectral_cap", False
    line = "after each step, shrinks query and key weights whose largest singular value passed the cap"
    source = "Newhouse et al. 2025, arXiv 2507.13338, section 3 (rescaled, not clipped; q and k only)"
    rule = "after each step, per {per}: W ← W · min(1, {cap:g} / σ(W)) for W_Q and W_K, σ the largest singular value"
    if_normed = (
        "a norm between the weights of q or of k and the logit undoes their scaling, so a cap on them would bound "
        "nothing",
        "use one of the two; with a norm, watch its gains",
    )
    if_computed = "capping the stored weight would not cap the weight in use"

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        weights = HeadWeights.of(target)
        tensors = weights.in_full_precision(optimizer, self.name, "makes small changes")
        for s, p in zip(weights.slices, weights.parameters):
            check_whole(s.parameter, p, self.name)
        check_changes_last(optimizer, self.name, tensors)
        replaced = ReplacementCheck(target.model, self.name, weights.names)
        owners = [(tensor, entries) for tensor, entries, _ in views_by_tensor(tensors, weights.slices)]

        @torch.no_grad()
        def after(stepped: Optimizer, *_: object) -> None:
            infinite = found_inf(stepped)
            for p, entries in owners:
                shares = [(weights.slices[i], self.factors(weights.slices[i].heads(p.detach()))) for i in entries]
                factor = factor_per_row(shares, p)
                if infinite is not None:
                    factor = torch.where(torch.as_tensor(infinite).to(p.device) != 0, 1.0, factor)
                p.detach().mul_(factor.to(p.dtype))

        first = optimizer.register_step_pre_hook(in_real_steps(lambda *_: replaced.check()))
        last = optimizer.register_step_post_hook(in_real_steps(after))
        return compose(map(Handle, (last.remove, first.remove)))

    def factors(self, heads: Tensor) -> Tensor:
        """Returns the factors min(1, cap/σ) per head of [n r m]; 1 if σ is not finite."""
        wider = heads.to(wide(heads.dtype))
        parts = wider.flatten(0, 1)[None] if self.per == "matrix" else wider
        finite = parts.isfinite().flatten(1).all(1)
        sigma = spectral_norm(torch.where(finite[:, None, None], parts, 0.0))
        factor = torch.where(sigma > self.cap, self.cap / sigma.clamp_min(self.cap), 1.0)
        return factor.expand(len(heads))


# σReparam: every linear layer's weight divided by its spectral norm, times a learned scalar.


@final
class SpectralScale(nn.Module):
    """Ŵ = (γ/σ) W, v = W u/‖W u‖, u' = Wᵀ v/‖Wᵀ v‖, σ = vᵀ W u'; u is a buffer, u ← u' in training forwards.

    Each forward makes one step of power iteration. v and u' carry no gradient, σ does. Everything is computed in
    float32 or wider, autocast or not. u starts at W's first right singular vector. A forward that gradient
    checkpointing recomputes starts at the u of the original, which must be the last one: RefusedError if several
    forwards of one weight wait for backward.
    """

    def __init__(self, weight: Tensor, init: Literal["keep", "one"]) -> None:
        super().__init__()
        self.register_buffer("right", _top_right(weight.detach()))
        self.right: Tensor
        self._started = self.right  # u at the start of the last forward
        self._forwards, self._version = 0, -1  # forwards with gradients since a backward; the weight's version then
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
                "leave "
                "the layer out of checkpointing"
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
    """Returns the first right singular vector, from the smaller Gram matrix, computed in double precision."""
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

    init="keep" starts γ at σ(W), so nothing changes at first (the authors' vision code); "one" starts it at 1 (the
    paper). γ joins the optimizer as gains do.
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
                        f"sigma_reparam: the weight of {name} was split over processes after the remedy was applied, "
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
    """Writes Ŵ as in evaluation into the stored weight and makes the layer plain again; False for other layers."""
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
