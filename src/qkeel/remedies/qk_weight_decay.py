"""Decoupled weight decay for query and key weights only."""

from __future__ import annotations

import dataclasses
import functools
from typing import final

import torch
from torch.optim import Optimizer

from qkeel.handle import Handle
from qkeel.patching.optimizer_hooks import before_change, go_first
from qkeel.remedies.base import Target
from qkeel.remedies.steps.head_groups import HeadGroups, views_by_tensor
from qkeel.remedies.steps.head_steps import DecayFactors
from qkeel.remedies.steps.head_weights import HeadWeights
from qkeel.remedies.steps.linearity import check_changes_last
from qkeel.remedies.steps.mixed_precision import found_inf, innermost
from qkeel.remedies.steps.replaced_weights import ReplacementCheck
from qkeel.remedies.steps.step_remedy import StepRemedy


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKWeightDecay(StepRemedy):
    """Decay w ← (1 - η·λ)·w before the optimizer's own step, for every row of a query or key weight; η is its rate.

    Biases, norms' gains and, in a fused projection, the rows of values are not decayed. It comes on top of what the
    optimizer decays itself: with AdamW(weight_decay=0) it is AdamW(weight_decay=λ) for these weights, bit for bit up
    to rounding, and with any other optimizer the same decay. `lalr` and `qk_lr` do not scale it. A weight without a
    gradient is not decayed, nor one in a step that a GradScaler skips.
    """

    decay: float = 0.1  #: λ

    name, may_be_zero = "qk_weight_decay", ("decay",)
    line = "decoupled weight decay for query and key weights only"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2, on part of the weights"
    rule = "before each step: W_Q ← (1 - {decay} · η) · W_Q, W_K ← (1 - {decay} · η) · W_K, η the optimizer's rate"

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        weights = HeadWeights.of(target)
        tensors = weights.in_full_precision(optimizer, self.name, "shrinks weights by parts in ten thousand")
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

        hook = optimizer.register_step_pre_hook(before_change(before))
        go_first(hook)  # before lalr and qk_lr read weights: they scale the optimizer's step
        return Handle(hook.remove)
