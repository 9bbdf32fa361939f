"""qk_weight_decay: decoupled weight decay for query and key weights only."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, final

import torch

from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadWeights, Remedy, Target, check_number, refuse_untold
from qkeel.remedies.bundle import Bundles
from qkeel.remedies.group_rates import GroupKeeps
from qkeel.remedies.linear import check_keeps
from qkeel.remedies.masters import innermost
from qkeel.remedies.pieces import owned
from qkeel.remedies.presence import Presence
from qkeel.sites.site import AttentionSite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKWeightDecay(Remedy):
    """w ← (1 - η·λ)·w before the optimizer's own step, for every row of a weight on the logit's way; η is its rate.

    Biases, norms' gains and, in a fused projection, the rows of values are not decayed. It comes on top of what the
    optimizer decays itself: with AdamW(weight_decay=0) it is AdamW(weight_decay=λ) for these weights, bit for bit up
    to rounding, and with any other optimizer the same decay. `lalr` and `qk_lr` do not scale it. A weight without a
    gradient is not decayed, nor one in a step that a GradScaler skips.
    """

    decay: float = 0.1

    name = "qk_weight_decay"
    line = "decoupled weight decay for query and key weights only"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2, on part of the weights"
    on_steps = True

    def __post_init__(self) -> None:
        check_number("qk_weight_decay", "decay", self.decay, zero=True)

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_untold(site)

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        weights = HeadWeights.of(target)
        tensors = weights.in_full_precision(optimizer, self.name, "shrinks weights by parts in ten thousand")
        check_keeps(optimizer, self.name, tensors)
        presence = Presence(target.model, self.name, (s.parameter for s in weights.slices))
        parts = [(piece, piece.weight) for _, _, found in owned(tensors, weights.slices) for piece in found]
        counts = [s.n for s in weights.slices]
        firsts = [0, *itertools.accumulate(counts)]
        bundles = Bundles(lambda piece: piece.makers(firsts, firsts[-1]))
        keeps = GroupKeeps(optimizer, tensors, counts, lambda group: group["lr"] * self.decay)
        dtype = functools.reduce(torch.promote_types, (piece.weight.dtype for piece, _ in parts))

        @torch.no_grad()
        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            presence.check()
            later = len(args) > 1 or bool(kwargs)  # a closure makes the gradients inside the step
            bundles.update(parts)
            keeps.read(dtype, parts[0][1].device)
            row = keeps.row(lambda w: later or w.grad is not None, getattr(optimizer, "found_inf", None))
            for bundle in bundles.all:
                bundle.scale(row)

        hook = optimizer.register_step_pre_hook(before)
        hooks = hook.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(hook.id, last=False)  # before lalr and qk_lr look: what they scale is the optimizer's step
        return Handle(hook.remove)
