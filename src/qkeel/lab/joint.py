"""One pass of AdamW over the weights of all runs of a stack, each at its own rate."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from qkeel.kernels.native import twins

# What torch's Adam asks, inside its step, for the weights of a group, their gradients and their state.
_ASKED = ("self", "group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
_STATE = frozenset(("step", "exp_avg", "exp_avg_sq"))
_NOT = -1.0  # the rate of what the pass leaves alone

Weights = Sequence[nn.Parameter]


@final
class JointAdamW:
    """The step of many runs' AdamW at once. Each run's hooks are called, and its state stays its optimizer's own.

    A hook may step some weights itself, as `remedies.adam_pass` does: they are left to it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], whole: Weights, own: Sequence[Weights]) -> None:
        self._optimizers, self._whole, self._own = optimizers, [p.detach() for p in whole], own
        groups = optimizers[0].param_groups
        self._group = _places(optimizers[0], own[0])
        self._decays = [groups[g]["weight_decay"] for g in self._group]
        beta1, beta2 = groups[0]["betas"]
        self._options: tuple[float, float, float] = (beta1, beta2, groups[0]["eps"])
        self._join()

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer], whole: Weights, own: Sequence[Weights]) -> Self | None:
        """The step of these, or None where they are not all torch's fused AdamW, alike but for rates.

        Args:
            whole: weights [runs ...]. own: of each optimizer, the parts of these that it steps.
        """
        known = tuple(inspect.signature(Adam._init_group).parameters) == _ASKED
        if not known or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return None
        fit = all(_fits(optimizer, table) for optimizer, table in zip(optimizers, own))
        alike = fit and all(_about(o, table) == _about(optimizers[0], own[0]) for o, table in zip(optimizers, own))
        return cls(optimizers, whole, own) if alike else None

    @torch.no_grad()
    def step(self, found: Sequence[Tensor | None], limit: float) -> Tensor:
        """Clip each run's gradients [runs ...] to the limit, take its step: norms [runs] before clipping."""
        there = [i for i, gradient in enumerate(found) if gradient is not None]
        gradients = [g.contiguous() for g in found if g is not None]
        norms = twins.clip_(gradients, limit)
        parts = [g.unbind() for g in gradients]
        rates = [self._rates(r, there, [part[r] for part in parts]) for r in range(len(self._own))]
        weights, means, variances = ([x[i] for i in there] for x in (self._whole, self._means, self._variances))
        done = self._done if len(there) == len(found) else self._done[there]
        table = torch.tensor(rates, dtype=torch.float64).T.contiguous()
        decays = [self._decays[i] for i in there]
        twins.adamw_(weights, gradients, (means, variances, done), table, (decays, *self._options))
        if done is not self._done:
            self._done[there] = done
        for optimizer, own in zip(self._optimizers, self._own):
            for hook in list(optimizer._optimizer_step_post_hooks.values()):
                hook(optimizer, (), {})
            if optimizer._optimizer_step_pre_hooks:
                for p in own:
                    p.grad = None
        return norms

    def _rates(self, r: int, there: Sequence[int], gradients: Sequence[Tensor]) -> list[float]:
        """The rate of each weight of a run that has a gradient, after the hooks before a step."""
        optimizer, own = self._optimizers[r], self._own[r]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        found = [rates[self._group[i]] for i in there]
        if not optimizer._optimizer_step_pre_hooks:
            return found
        for i, gradient in zip(there, gradients):
            own[i].grad = gradient
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        if "_init_group" not in vars(optimizer):
            return found
        left: set[int] = set()
        for group in optimizer.param_groups:
            lists: list[list[Any]] = [[] for _ in _ASKED[2:]]
            optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
            left.update(map(id, lists[0]))
        return [rate if id(own[i]) in left else _NOT for i, rate in zip(there, found)]

    @torch.no_grad()
    def _join(self) -> None:
        """Let the optimizers' means, variances and steps be parts of those of all runs."""
        self._means, self._variances = ([torch.zeros_like(p) for p in self._whole] for _ in range(2))
        self._done = torch.zeros(len(self._whole), len(self._optimizers))
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
    """Whether it is an AdamW over these weights whose step is the pass."""
    groups = optimizer.param_groups
    every = {id(p) for group in groups for p in group["params"]} == {id(p) for p in own}
    states = all(_STATE.issuperset(optimizer.state.get(p, {})) for p in own)
    return (
        type(optimizer) is AdamW
        and "_init_group" not in vars(optimizer)
        and every
        and states
        and all(map(_usual, groups))
    )


def _usual(group: dict[str, Any]) -> bool:
    odd = ("amsgrad", "maximize", "capturable", "differentiable")
    return group.get("fused") is True and group["decoupled_weight_decay"] and not any(group.get(name) for name in odd)


def _about(optimizer: Optimizer, own: Weights) -> tuple[Any, ...]:
    """What must be alike in all runs; β and ε in all groups too."""
    options = {(*group["betas"], group["eps"]) for group in optimizer.param_groups}
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return _places(optimizer, own), decays, options if len(options) == 1 else optimizer
