"""Scales the steps of an optimizer head by head, for any optimizer whose steps are proportional to its rate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.patching.modes import multiply_all
from qkeel.patching.optimizers import before_change, go_first, in_real_steps
from qkeel.remedies.head_rows import HeadRows, HeadView, WeightNorm, views_by_tensor
from qkeel.remedies.head_weights import (
    LOW_PRECISION,
    HeadWeights,
    SplitNorms,
    found_inf,
)
from qkeel.remedies.optimizer_trials import ParamGroup, check_steps

Tensors = Sequence[
    Tensor | None
]  # the tensor that an optimizer updates for each weight, or None if it does not
Factors = Callable[
    [Tensor], Tensor
]  # computes the factor of every head [h] from the measures of all heads [h]


def scale_steps(
    optimizer: Optimizer,
    weights: HeadWeights,
    factors: Factors,
    *,
    remedy: str,
    tensors: Tensors,
    measure: Measure | None = None,
    keeps_decay: bool = False,
    freezes: bool = False,
) -> Handle:
    """Scales every step of these weights by factors per head, until the returned handle is removed.

    The full step is scaled, including decoupled weight decay: w ← w_old + f · (w_new - w_old). With `keeps_decay` the
    decay keeps its full size: w ← (1 - ηλ) · w_old + f · (w_new - (1 - ηλ) · w_old). A factor of 1 leaves the new
    weight unchanged bit for bit. This is exact for every optimizer whose step is linear in the learning rate (see
    `check_steps`). It happens before all other post-step hooks (such as a clip or an average), in whatever order they
    were added, and the host reads nothing back. The rows of the heads are copied for the duration of the step.

    Args:
        optimizer: the optimizer.
        weights: the weights, with the rows of their heads.
        factors: computes the factors [h] from the measures [h], ordered by weight, before the step.
        remedy: the remedy's name, for errors.
        tensors: the tensor that the optimizer updates for each weight, or None for frozen weights.
        measure: measures the heads; without it, all measures are 1.
        keeps_decay: whether decoupled weight decay keeps its full size.
        freezes: whether all factors are 0 or 1; weights with a factor of 0 then keep their bits whatever the step does.

    Example:
        >>> from qkeel.nn import Attention
        >>> from qkeel.remedies.base import Target
        >>> from qkeel.sites import find_sites
        >>> model = Attention(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> weights = HeadWeights.of(Target(model=model, optimizer=optimizer, sites=find_sites(model)))
        >>> tensors = scalable(optimizer, weights, "slower")
        >>> handle = scale_steps(optimizer, weights, lambda ones: 0.1 * ones, remedy="slower", tensors=tensors)
        >>> before = model.q_proj.weight.clone()
        >>> model.q_proj.weight.grad = torch.ones(8, 8)
        >>> optimizer.step()
        >>> torch.allclose(model.q_proj.weight, before - 0.1)
        True
    """
    views = [
        view
        for _, _, views_of_tensor in views_by_tensor(tensors, weights.slices)
        for view in views_of_tensor
    ]
    rows = HeadRows(
        [(view, view.weight) for view in views],
        [view.places(weights.counts) for view in views],
    )
    decay = (
        DecayFactors(optimizer, tensors, weights.counts, _decay_rate)
        if keeps_decay
        else None
    )
    measures = measure or Measure(weights, tensors, None)
    copies: list[Tensor] = []
    row: list[Tensor] = []  # the factors of the current step, if one runs

    @torch.no_grad()
    def before(_: Optimizer) -> None:
        if not freezes:
            _check_precision(remedy, views)
        row[:] = [F.pad(factors(measures()), (0, 1), value=1.0)]
        copies[:] = rows.copies()
        if decay is not None:
            decay.read(row[0].dtype, row[0].device)

    @torch.no_grad()
    def after(stepped: Optimizer, *_: object) -> None:
        if row:  # if a subclass's step calls its parent's, both run hooks, but only the inner step is scaled
            if decay is not None:
                kept = decay.row(lambda w: w.grad is not None, found_inf(stepped))
                multiply_all(copies, rows.factors(kept, copies))
            (rows.restore if freezes else rows.interpolate)(copies, row[0])
        clear()

    def clear() -> None:
        row.clear()
        copies.clear()

    first = optimizer.register_step_pre_hook(in_real_steps(before_change(before)))
    last = optimizer.register_step_post_hook(in_real_steps(after))
    go_first(last)
    return compose(map(Handle, (clear, last.remove, first.remove)))


def _check_precision(remedy: str, views: Sequence[HeadView]) -> None:
    for view in views:
        if view.weight.dtype in LOW_PRECISION:
            raise RefusedError(
                f"{remedy} scales small steps, and {view.shares[0][1].parameter} was cast to {view.weight.dtype} since "
                "it was applied, which rounds them away; keep float32 weights and use autocast, or remove() the handle"
            )


def scalable(
    optimizer: Optimizer,
    weights: HeadWeights,
    remedy: str,
    *,
    keeps_decay: bool = False,
) -> Tensors:
    """Returns the tensors that an optimizer updates for some weights, if their steps can be scaled.

    Raises:
        RefusedError: the optimizer does not update these weights, its step is not linear in the rate, or the weights'
            precision would round scaled steps away.
    """
    tensors = weights.in_full_precision(optimizer, remedy, "scales small steps")
    check_steps(optimizer, remedy, tensors, needs_decoupled_decay=keeps_decay)
    return tensors


@final
class Measure:
    """A number for every head, such as a norm, in one row ordered by weight; without a norm all are 1.

    If the optimizer updates a float32 copy, that is measured, since the weight is only its rounded value."""

    def __init__(
        self, weights: HeadWeights, tensors: Tensors, norm: WeightNorm | None
    ) -> None:
        self._slices, self._norm = weights.slices, norm
        self._weights = [
            p if t is None else t for p, t in zip(weights.parameters, tensors)
        ]
        self._split = SplitNorms(weights.slices, self._weights, norm)

    def __call__(self) -> Tensor:
        """Returns the current numbers [h]."""
        device = self._weights[0].device
        if self._norm is None:
            dtype = functools.reduce(
                torch.promote_types, (x.dtype for x in self._weights), torch.float32
            )
            return torch.ones(
                sum(s.n for s in self._slices), dtype=dtype, device=device
            )
        numbers: list[Tensor] = []
        for i, (s, weight) in enumerate(zip(self._slices, self._weights)):
            heads = (
                self._split.squares(i)
                if i in self._split
                else self._norm(s.heads(weight.detach()))
            )
            numbers.append(heads.to(device))
        return self._split.norms(torch.cat(numbers))

    @torch.no_grad()
    def at_start(self) -> Tensor:
        """Returns the numbers when a remedy is applied."""
        if (
            dist.world() > 1
        ):  # no process may fail from here on, because they wait for each other
            dist.gather_messages("qkeel.apply", "measures")
        return self()


def _decay_rate(group: ParamGroup) -> float | Tensor:
    """Returns η·λ, or 0 if there is no weight decay."""
    return group.get("lr", 0.0) * group.get("weight_decay", 0.0)


Rate = Callable[[ParamGroup], float | Tensor]


@final
class DecayFactors:
    """Computes 1 - rate for every head of every weight from its parameter group, in a few operators per group.

    Args:
        optimizer: the optimizer with the groups.
        tensors: the tensor that the optimizer updates for each weight, or None if the weight is not updated.
        counts: the number of heads of each weight.
        rate: computes, from a group's options, the fraction of a weight that one step removes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: Sequence[Tensor | None],
        counts: Sequence[int],
        rate: Rate,
    ) -> None:
        self._optimizer, self._tensors, self._counts, self._rate = (
            optimizer,
            tensors,
            counts,
            rate,
        )
        self._values = torch.ones(1)
        self._groups: tuple[int, ...] = ()
        self._index = torch.empty(0, dtype=torch.int64)

    def read(self, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the current rates. Numbers are never copied to the device, and tensors are never read by the host."""
        groups = self._optimizer.param_groups
        if (self._values.shape[0], self._values.dtype, self._values.device) != (
            len(groups) + 1,
            dtype,
            device,
        ):
            self._values = torch.ones(len(groups) + 1, dtype=dtype, device=device)
        for value, group in zip(self._values.unbind(), groups):
            rate = self._rate(group)
            value.fill_(1 - (rate.reshape(()) if isinstance(rate, Tensor) else rate))

    def row(
        self, is_stepped: Callable[[Tensor], bool], found_inf: Tensor | None
    ) -> Tensor:
        """Returns the factors [all heads + 1] with a 1 at the end.

        The factors are 1 for tensors that are not updated, and for all tensors in a step that a GradScaler skips."""
        groups = self._optimizer.param_groups
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        numbers = tuple(
            len(groups) if t is None or not is_stepped(t) else group_of[id(t)]
            for t in self._tensors
        )
        if numbers != self._groups or self._index.device != self._values.device:
            self._groups = numbers
            index = [i for i, n in zip(numbers, self._counts) for _ in range(n)]
            self._index = torch.tensor(
                [*index, len(groups)], device=self._values.device
            )
        if found_inf is None:
            return self._values[self._index]
        # A fused optimizer runs its hooks even if a GradScaler skips the step.
        skipped = torch.as_tensor(found_inf).to(self._values.device) != 0
        return torch.where(skipped, 1.0, self._values)[self._index]
