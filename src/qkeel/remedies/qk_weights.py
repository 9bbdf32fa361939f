"""Remedies for steps of query and key weights: a smaller rate, freezing, weight decay, a cap on the spectral norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.errors import RefusedError
from qkeel.functional.bounds import spectral_norm
from qkeel.functional.norms import wide
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.patching.optimizers import in_real_steps
from qkeel.remedies.base import Target, where
from qkeel.remedies.head_weights import HeadWeights, found_inf
from qkeel.remedies.optimizer_steps import (
    decay_before_steps,
    rows_of,
    scale_steps,
    with_one,
)
from qkeel.remedies.step_remedy import StepRemedy
from qkeel.sites.site import AttentionSite, HeadSlice


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKLearningRate(StepRemedy):
    """Multiplies the steps of query and key weights, but not of biases, by `factor`. A factor of 0 freezes them."""

    factor: float = 0.1

    name, may_be_zero, takes_sigma_reparam = "qk_lr", ("factor",), True
    line = "a fixed, smaller learning rate for query and key weights"
    source = "the ablation of Anson & Aitchison 2025, arXiv 2511.21377, figure 1"
    rule = "each step: lr(W_Q) = lr(W_K) = {factor} · η, η the optimizer's rate"
    if_computed = "the scale that it is multiplied by would keep its rate"

    def apply(self, target: Target) -> Handle:
        weights = HeadWeights(target, self.name)
        return scale_steps(
            weights,
            lambda: weights.row(self.factor),
            remedy=self.name,
            freezes=self.factor == 0,
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenQK(StepRemedy):
    """Freezes everything from which queries and keys are computed: weights, biases, and whatever else is trained between
    the projections and q·k, such as gains of norms, vectors that are added or multiplied, tables of positions.

    This is the control in a comparison, since the improvement of another run over it is due to training queries and
    keys. After each step the rows are restored bit for bit, whatever the optimizer and its weight decay did to them,
    even if it made them infinite or NaN. An optimizer that keeps a copy of the weights is refused.
    Their gradients still count in the global norm of gradient clipping, so that the other weights take the same steps
    as in a run without the remedy. A learned scale or temperature that multiplies q·k itself is still trained, and so is
    a norm before the projections, which is that of the values too.
    """

    name = "frozen_qk"
    line = "leaves the weights, biases and gains of queries and keys as they are: the control in a comparison"
    source = "the control in a comparison; random attention as in Tay et al. 2021, arXiv 2005.00743"
    rule = "each step: W_Q, W_K, their biases and the gains of norms on q and k stay as they were"
    if_computed = "the scale that it is multiplied by would still be trained"

    def holds(self, site: AttentionSite) -> Refusal | None:
        if site.normed and site.description is not None:
            return Refusal(
                "q or k is normed, and a description does not say by which gains, so they would still be trained",
                "set requires_grad to False on the gains and the query and key weights yourself",
            )
        return StepRemedy.holds(self, site)

    def apply(self, target: Target) -> Handle:
        weights = HeadWeights(target, self.name, _biases_and_gains(target))
        for s, p, tensor in zip(weights.slices, weights.parameters, weights.tensors):
            if tensor is None and p.requires_grad:
                raise RefusedError(
                    f"frozen_qk acts on steps of {s.parameter} too, which the optimizer does not hold: pass a list with "
                    "the optimizer that does, or set its requires_grad to False"
                )
        return scale_steps(
            weights,
            lambda: weights.row(0.0),
            remedy=self.name,
            freezes=True,
        )


def _biases_and_gains(target: Target) -> Iterator[HeadSlice]:
    """Yields the biases of query and key weights, and what else stands between them and q·k."""
    for s in target.logit_slices():
        if (bias := s.bias_of()) is not None:
            yield bias
    for site in target.sites:
        # Of qkeel's own modules, the norms are known without a search.
        norms = () if site.between else (*site.query_gains, *site.key_gains)
        for name in {n: None for norm in norms for n in (norm.parameter, norm.bias)}:
            if name is not None:
                rows = torch.arange(len(target.parameter(name)))
                yield HeadSlice(parameter=name, axis=0, index=rows[None])
        yield from site.between


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKWeightDecay(StepRemedy):
    """Decays every row of a query or key weight, w ← (1 - η·λ)·w, before the optimizer's own step; η is its rate.

    Biases, gains of norms and, in a fused projection, the rows for values are not decayed. This decay is added to the
    optimizer's own decay. With AdamW(weight_decay=0), the result for these weights equals that of
    AdamW(weight_decay=λ) up to rounding, and any other optimizer gets the same decay. `lalr` and `qk_lr` do not scale
    it. Weights without a gradient are not decayed, and in a step that a GradScaler skips no weight is decayed.
    """

    decay: float = 0.1  #: λ

    name, may_be_zero, takes_sigma_reparam = "qk_weight_decay", ("decay",), True
    line = "decoupled weight decay for query and key weights only"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2, on part of the weights"
    rule = "before each step: W_Q ← (1 - {decay} · η) · W_Q, W_K ← (1 - {decay} · η) · W_K, η the optimizer's rate"

    def apply(self, target: Target) -> Handle:
        weights = HeadWeights(target, self.name)
        weights.check_precision(
            self.name, "shrinks weights by a few parts in ten thousand"
        )
        weights.check_steps(self.name)
        return compose(
            [decay_before_steps(x, weights, self.decay) for x in weights.optimizers]
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpectralCap(StepRemedy):
    """W^h ← W^h · min(1, cap/σ(W^h)) after every optimizer step, for each query and key weight.

    With one matrix on each side, this guarantees |logit| ≤ scale · cap² · ‖x_i‖ ‖x_j‖ (except for biases). σ is exact;
    it is computed from the smaller Gram matrix of a head's rows (per=head) or of all rows (per=matrix). Weights under
    the cap stay unchanged bit for bit, and so do frozen weights, which are refused if they are over it. A step that a
    GradScaler skipped changes nothing.

    Source: Newhouse et al. 2025, arXiv 2507.13338, who cap the singular values of the weights after each step. Here the
    entire block is rescaled, not just its largest singular values, so the ratios of its singular values stay the same.
    Only q and k are capped. Yoshida & Miyato 2017, arXiv 1705.10941, penalise σ in the loss.
    """

    cap: float = 4.0  #: largest σ of a head's weight, above 0
    per: Literal["head", "matrix"] = "head"

    name, takes_masks = "spectral_cap", False
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
        weights = HeadWeights(target, self.name)
        weights.check_precision(self.name, "makes small changes")
        self._check(target, weights)
        weights.check_steps(self.name)
        rows = {x: rows_of(weights, x) for x in weights.optimizers}

        @torch.no_grad()
        def after(stepped: Optimizer, *_: object) -> None:
            factors = weights.row(1.0)
            for s, p, tensor, values in zip(
                weights.slices,
                weights.parameters,
                weights.held_by(stepped),
                factors.split(weights.counts),
            ):
                # A frozen weight that has no gradient is moved by no step.
                if tensor is not None and (
                    p.requires_grad or p.grad is not None or tensor.grad is not None
                ):
                    values.copy_(self.factors(s.heads(tensor)))
            infinite = found_inf(stepped)
            if infinite is not None:
                factors = torch.where(infinite.to(factors.device) != 0, 1.0, factors)
            rows[stepped].scale(with_one(factors))

        hooks = [
            optimizer.register_step_post_hook(in_real_steps(after))
            for optimizer in weights.optimizers
        ]
        return compose([Handle(hook.remove) for hook in hooks])

    @torch.no_grad()
    def _check(self, target: Target, weights: HeadWeights) -> None:
        """Raises RefusedError for weights that are in parts, frozen over the cap, or make values too."""
        for s, p in zip(weights.slices, weights.parameters):
            if dist.is_split(p):
                raise RefusedError(
                    f"{s.parameter} is split across processes, and {self.name} needs all rows and columns of a head at "
                    "once; use lalr or qk_clip, which work with parts, or DistributedDataParallel, which keeps weights "
                    "whole"
                )
            # A weight that was capped before may be over the cap by some rounding.
            least = 1 - 8 * torch.finfo(p.dtype).eps
            if not p.requires_grad and bool((self.factors(s.heads(p)) < least).any()):
                raise RefusedError(
                    f"spectral_cap never changes frozen weights, and {s.parameter} is frozen with a singular value "
                    f"over {self.cap:g}. Choose a larger cap, or train the weight"
                )
            for site in target.all_sites or target.sites:
                if any(target.overlap(s, v) for v in site.value_weights):
                    raise RefusedError(
                        f"spectral_cap at {where(site)}: {s.parameter} makes values too, which the cap would change; "
                        "use qk_clip, which scales the other side of the logit"
                    )

    def factors(self, heads: Tensor) -> Tensor:
        """Returns the factors min(1, cap/σ) for each head of [n r m], or 1 if σ is not finite."""
        wider = heads.to(wide(heads.dtype))
        parts = wider.flatten(0, 1)[None] if self.per == "matrix" else wider
        finite = parts.isfinite().flatten(1).all(1)
        sigma = spectral_norm(torch.where(finite[:, None, None], parts, 0.0))
        # torch computes both branches, so the divisor is kept away from 0 where the cap is not reached.
        factor = torch.where(
            sigma > self.cap, self.cap / sigma.clamp_min(self.cap), 1.0
        )
        return factor.expand(len(heads))
