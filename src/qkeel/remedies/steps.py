"""The mechanism behind per-head learning rates: every optimizer step of some weights, scaled per head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkeel.handle import Handle
from qkeel.remedies.base import HeadWeights, Target
from qkeel.remedies.linear import check_linear
from qkeel.sites.site import HeadSlice, across

Measure = Callable[[Tensor], Tensor]
Rates = Callable[[list[Tensor]], list[Tensor]]


def scale_steps(target: Target, remedy: str, weights: HeadWeights, measure: Measure, rates: Rates) -> Handle:
    """Scale every optimizer step of the weights, per head, until the handle is removed.

    w ← w_old + f · (w_new - w_old): the whole step, decoupled weight decay included, is scaled. Before the step,
    `measure` gets each entry's weight as [n r m] and gives a number per head [n]; `rates` turns those of all
    entries into factors f per head, entry by entry. Factor 1 leaves the new weight bit for bit. Exact for every
    optimizer linear in the learning rate. The one copy of the weights lives only inside the step. Nothing is read
    back to the host, and there is no loop over heads.

    The scaling comes before every other post hook of the step (a clip, an average), in whatever order they came.
    """
    optimizer = target.need_optimizer(remedy)
    check_linear(optimizer, remedy, weights)
    owners = weights.owners()
    saved: list[Tensor] = []
    scale: list[Tensor] = []

    @torch.no_grad()
    def before(*_: Any) -> None:
        saved.clear()  # of a step that raised
        scale.clear()
        sizes: dict[int, Tensor] = {}
        for p, entries in owners:  # measured, then copied at once: the second read comes from the cache
            sizes.update((i, measure(weights.slices[i].heads(p.detach()))) for i in entries)
            saved.append(p.detach().clone())
        factors = rates([sizes[i] for i in range(len(sizes))])
        for p, entries in owners:
            scale.append(merge_lines([(weights.slices[i], factors[i].to(p.dtype)) for i in entries], p))

    @torch.no_grad()
    def after(*_: Any) -> None:
        # Empty when a subclass's step calls its parent's: both run the hooks, and the inner one was the step.
        for owner, old, factor in zip(owners, saved, scale):
            new = owner[0].detach()
            torch.lerp(old, new, factor, out=new)
        saved.clear()
        scale.clear()

    first, last = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    hooks = last.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(last.id, last=False)

    def undo() -> None:
        first.remove()
        last.remove()
        saved.clear()

    return Handle(undo)


def merge_lines(shares: Sequence[tuple[HeadSlice, Tensor]], weight: Tensor) -> Tensor:
    """Factors per head of every slice of one weight (or bias), as one tensor that broadcasts against it.

    Rows that no head owns get 1. Rows that several slices own (a weight that layers share) get the smallest.
    """
    axis = shares[0][0].axis if weight.ndim > 1 else 0
    rows = weight.shape[axis]
    if len(shares) == 1:
        lines = shares[0][0].lines(shares[0][1], rows)
    else:
        lines = torch.stack([s.lines(factor, rows, nobody=torch.inf) for s, factor in shares]).amin(0)
        lines = torch.where(lines.isinf(), 1.0, lines)
    return across(lines, axis) if weight.ndim > 1 else lines
