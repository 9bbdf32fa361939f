"""Scales the steps of an optimizer head by head, for any optimizer whose steps are proportional to its rate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel.handle import Handle, compose
from qkeel.patching.optimizers import before_change, go_first, in_real_steps
from qkeel.remedies.head_rows import HeadRows
from qkeel.remedies.head_weights import HeadWeights, found_inf

SCALES = "scales small steps"


def scale_steps(
    weights: HeadWeights,
    factors: Callable[[], Tensor],
    *,
    remedy: str,
    freezes: bool = False,
) -> Handle:
    """Scales every step of these weights by factors per head, until the returned handle is removed.

    The full step is scaled, including decoupled weight decay: w ← w_old + f · (w_new - w_old). A factor of 1 leaves the new
    weight unchanged bit for bit. This is exact for every optimizer whose step is linear in the learning rate, which a
    trial step shows. It happens before all other post-step hooks (such as a clip or an average), in whatever order they
    were added, and the host reads nothing back. The tensors are copied for the duration of the step.

    Args:
        weights: the weights, with the rows of their heads and the optimizers that hold them.
        factors: computes the factors [h], ordered by weight, before each step of one of the optimizers.
        remedy: the remedy's name, for errors.
        freezes: whether all factors are 0 or 1; weights with a factor of 0 then keep their bits whatever the step does.

    Raises:
        RefusedError: the optimizer's step is not linear in the rate, or the precision of the weights would round scaled
            steps away.

    Example:
        >>> from qkeel.nn import Attention
        >>> from qkeel.remedies.base import Target
        >>> from qkeel.sites import find_sites
        >>> model = Attention(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> target = Target(model=model, optimizer=optimizer, sites=find_sites(model))
        >>> weights = HeadWeights(target, "slower")
        >>> handle = scale_steps(weights, lambda: weights.row(0.1), remedy="slower")
        >>> before = model.q_proj.weight.clone()
        >>> model.q_proj.weight.grad = torch.ones(8, 8)
        >>> optimizer.step()
        >>> torch.allclose(model.q_proj.weight, before - 0.1)
        True
    """
    if not freezes:
        weights.check_precision(remedy, SCALES)
    weights.check_steps(remedy, is_scaled=not freezes)

    def scale_steps_of(optimizer: Optimizer) -> Handle:
        rows = rows_of(weights, optimizer)
        copies: list[Tensor] = []
        # The factors of the current step, if one runs.
        row: list[Tensor] = []

        @torch.no_grad()
        def before(_: Optimizer) -> None:
            if not freezes:
                # Again, since a model may have been cast after apply.
                weights.check_precision(remedy, SCALES)
            row[:] = [with_one(factors())]
            copies[:] = rows.copies()

        @torch.no_grad()
        def after(*_: object) -> None:
            # If a subclass's step calls its parent's, both run the hooks, but only the inner step is scaled.
            if row:
                (rows.restore if freezes else rows.interpolate)(copies, row[0])
            clear()

        def clear() -> None:
            row.clear()
            copies.clear()

        # Gradients exist and weights are old at this time, also in `step(closure)`.
        first = optimizer.register_step_pre_hook(in_real_steps(before_change(before)))
        last = optimizer.register_step_post_hook(in_real_steps(after))
        # Averages and clips that other hooks make see the scaled weights.
        go_first(last)
        return compose(map(Handle, (clear, last.remove, first.remove)))

    return compose(map(scale_steps_of, weights.optimizers))


def decay_before_steps(
    optimizer: Optimizer, weights: HeadWeights, decay: float
) -> Handle:
    """Multiplies the rows of heads by 1 - η · decay before every step, until the returned handle is removed."""
    rows = rows_of(weights, optimizer)

    @torch.no_grad()
    def before(_: Optimizer) -> None:
        rows.scale(decayed(optimizer, weights, decay))

    hook = optimizer.register_step_pre_hook(in_real_steps(before_change(before)))
    # Before `scale_steps` copies the weights, so that only the optimizer's own step is scaled.
    go_first(hook)
    return Handle(hook.remove)


def rows_of(weights: HeadWeights, optimizer: Optimizer) -> HeadRows:
    """Returns the rows of the tensors that the optimizer updates, with one factor for each head of each weight."""
    shares = zip(weights.held_by(optimizer), weights.slices, weights.indices())
    return HeadRows(
        [(tensor, s, i) for tensor, s, i in shares if tensor is not None],
        sum(weights.counts),
    )


def with_one(factors: Tensor) -> Tensor:
    """Returns a row of factors with a 1 at its end, for rows that no head owns."""
    return F.pad(factors, (0, 1), value=1.0)


def decayed(optimizer: Optimizer, weights: HeadWeights, decay: float) -> Tensor:
    """Returns 1 - η · decay for each head of each weight, with the rate η of the weight's group, and a 1 at the end.

    It is 1 for weights that a step leaves as they are: without a gradient, and in a step that a GradScaler skips."""
    group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    row = weights.row(1.0)
    tensors = weights.held_by(optimizer)
    for values, tensor in zip(row.split(weights.counts), tensors):
        if tensor is not None and tensor.grad is not None:
            lost = group_of[id(tensor)]["lr"] * decay
            # A rate that is a tensor stays on its device: the host waits for nothing.
            values.fill_(1 - (lost.reshape(()) if isinstance(lost, Tensor) else lost))
    infinite = found_inf(optimizer)
    if infinite is not None:
        row = torch.where(infinite.to(row.device) != 0, 1.0, row)
    return with_one(row)
