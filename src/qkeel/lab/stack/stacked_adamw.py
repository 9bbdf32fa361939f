"""Clipping and one pass of AdamW over the weights of all runs of a stack, each run at its own rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from qkeel.kernels.native import stacked_ops
from qkeel.patching import adam_groups

_STATE = frozenset(("step", "exp_avg", "exp_avg_sq"))
_NOT_STEPPED = -1.0  # the rate of a weight that the pass leaves alone

Weights = Sequence[nn.Parameter]


@final
class StackedAdamW:
    """The step of many runs' AdamW at once. Each run's hooks are called, and its state stays its optimizer's own.

    A hook may step some weights itself, as `lalr` does by `remedies.steps.fused_adam`: the pass leaves them to it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], stacked: Weights, own: Sequence[Weights]) -> None:
        self._optimizers, self._weights, self._own = optimizers, [p.detach() for p in stacked], own
        groups = optimizers[0].param_groups
        self._group = _places(optimizers[0], own[0])
        self._decays = [[o.param_groups[g]["weight_decay"] for o in optimizers] for g in self._group]
        beta1, beta2 = groups[0]["betas"]
        self._options: tuple[float, float, float] = (beta1, beta2, groups[0]["eps"])
        self._gradients: dict[int, Tensor] = {}
        self._take_state()

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer], stacked: Weights, own: Sequence[Weights]) -> Self | None:
        """Returns the step of these, or None where they are not all torch's fused AdamW, alike but for rates.

        Args:
            optimizers: one a run. stacked: weights [runs ...]. own: of each optimizer, the parts of them that it steps.
        """
        if adam_groups.every_optimizer_has_hooks() or not all(map(_fits, optimizers, own)):
            return None
        alike = all(_about(o, table) == _about(optimizers[0], own[0]) for o, table in zip(optimizers, own))
        return cls(optimizers, stacked, own) if alike else None

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients [runs ...] by weight."""
        self._gradients = {i: g.contiguous() for i, g in enumerate(gradients) if g is not None}

    def clip(self, limit: float) -> Tensor:
        """Scales each run's gradients down to the limit, 0 for none; returns norms [runs] before that."""
        return stacked_ops.clip_(list(self._gradients.values()), limit)

    @torch.no_grad()
    def step(self) -> None:
        """Takes the step of each run, with its hooks, and forgets the gradients."""
        there, gradients = list(self._gradients), list(self._gradients.values())
        parts = [g.unbind() for g in gradients]
        rates = [self._rates(r, there, [part[r] for part in parts]) for r in range(len(self._own))]
        weights, means, variances = ([x[i] for i in there] for x in (self._weights, self._means, self._variances))
        done = self._done if len(there) == len(self._weights) else self._done[there]
        table = torch.tensor(rates, dtype=torch.float64).T.contiguous()
        decays = [decay for i in there for decay in self._decays[i]]
        stacked_ops.adamw_(weights, gradients, (means, variances, done), table, (decays, *self._options))
        if done is not self._done:
            self._done[there] = done
        for optimizer, own in zip(self._optimizers, self._own):
            adam_groups.call_hooks_after(optimizer)
            if adam_groups.has_hooks_before(optimizer):
                for p in own:
                    p.grad = None
        self._gradients = {}

    def _rates(self, r: int, there: Sequence[int], gradients: Sequence[Tensor]) -> list[float]:
        """The rate of each weight of a run that has a gradient, after the hooks before a step."""
        optimizer, own = self._optimizers[r], self._own[r]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        found = [rates[self._group[i]] for i in there]
        if not adam_groups.has_hooks_before(optimizer):
            return found
        for i, gradient in zip(there, gradients):
            own[i].grad = gradient
        adam_groups.call_hooks_before(optimizer)
        if not adam_groups.is_answered(optimizer):
            return found
        left = adam_groups.stepped(optimizer)
        return [rate if id(own[i]) in left else _NOT_STEPPED for i, rate in zip(there, found)]

    @torch.no_grad()
    def _take_state(self) -> None:
        """Makes the optimizers' means, variances and steps parts of those of all runs."""
        self._means, self._variances = ([torch.zeros_like(p) for p in self._weights] for _ in range(2))
        self._done = torch.zeros(len(self._weights), len(self._optimizers))
        for r, (optimizer, table) in enumerate(zip(self._optimizers, self._own)):
            for i, p in enumerate(table):
                new = {"step": self._done[i, r], "exp_avg": self._means[i][r], "exp_avg_sq": self._variances[i][r]}
                for name, x in optimizer.state.get(p, {}).items():
                    new[name].copy_(x)
                optimizer.state[p] = new


def _places(optimizer: Optimizer, own: Weights) -> list[int]:
    """The group of each weight."""
    of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [of[id(p)] for p in own]


def _fits(optimizer: Optimizer, own: Weights) -> bool:
    """Returns whether it is an AdamW over these weights whose step is the pass."""
    groups = optimizer.param_groups
    known = isinstance(optimizer, AdamW) and adam_groups.is_known(optimizer) and not adam_groups.is_answered(optimizer)
    every = {id(p) for group in groups for p in group["params"]} == {id(p) for p in own}
    states = all(_STATE.issuperset(optimizer.state.get(p, {})) for p in own)
    return known and every and states and all(map(_is_usual, groups))


def _is_usual(group: adam_groups.Group) -> bool:
    decoupled = group["decoupled_weight_decay"] and not group["amsgrad"] and not group["maximize"]
    return decoupled and adam_groups.is_fused(group)


def _about(optimizer: Optimizer, own: Weights) -> tuple[object, ...]:
    """The settings that must be alike in all runs, β and ε in all groups too; rates and weight decays are a run's."""
    options = {(*group["betas"], group["eps"]) for group in optimizer.param_groups}
    return _places(optimizer, own), options if len(options) == 1 else optimizer
