"""Muon: momentum, orthogonalised per matrix, on the hidden matrices; AdamW on everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from qkeel.functional.updates import newton_schulz
from qkeel.patching.adam_groups import Group
from qkeel.patching.private_operators import add_to_all, lerp_all, lerp_all_in_place, multiply_all

RMS_MATCH = 0.2  # Moonlight's: the update's root mean square equals AdamW's usual one


@final
class Muon(torch.optim.Optimizer):
    """W ← W - lr·(0.2·√max(m, n)·O + λ·W), O = Newton-Schulz(Nesterov momentum); AdamW in the other groups.

    A group with `muon=True` holds matrices; every other group, also one that is added later, is AdamW's. One
    learning rate serves both, which is what the factor 0.2·√max(m, n) is for. Newton-Schulz runs in float32 on
    CPUs (bfloat16 is emulated there), matrices of one shape as one batch. The step is linear in the rate.

    Source: Jordan 2024; Liu et al. 2025, arXiv 2502.16982, equation 4 (they iterate in bfloat16).
    """

    def __init__(
        self,
        params: Iterable[Group],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            # A remedy may put a scale or gain of its own into any group.
            matrices = [p for p in weights if group["muon"] and p.ndim == 2]
            others = [p for p in weights if not group["muon"] or p.ndim != 2]
            if matrices:
                self._orthogonal(matrices, group)
            if others:
                self._adamw(others, group)
        return loss

    def _orthogonal(self, weights: list[Tensor], group: Group) -> None:
        shapes: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        for weight in weights:
            shapes[weight.shape, weight.dtype].append(weight)
        for alike in shapes.values():
            grads = [p.grad for p in alike if p.grad is not None]
            means = [self._buffer(p, "momentum") for p in alike]
            lerp_all_in_place(means, grads, 1 - group["momentum"])
            ahead = lerp_all(grads, means, group["momentum"])
            update = newton_schulz(torch.stack(ahead)).unbind()
            size = group["lr"] * RMS_MATCH * max(alike[0].shape) ** 0.5
            if group["weight_decay"]:
                multiply_all(alike, 1 - group["lr"] * group["weight_decay"])
            add_to_all(alike, list(update), alpha=-size)

    def _adamw(self, weights: list[Tensor], group: Group) -> None:
        grads: list[Tensor] = [p.grad for p in weights if p.grad is not None]
        adamw(
            weights,
            grads,
            [self._buffer(p, "exp_avg") for p in weights],
            [self._buffer(p, "exp_avg_sq") for p in weights],
            [],
            [self._steps(p) for p in weights],
            fused=True if fusable(weights[0]) else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _buffer(self, weight: Tensor, name: str) -> Tensor:
        state = self.state[weight]
        if name not in state:
            state[name] = torch.zeros_like(weight)
        return state[name]

    def _steps(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device if fusable(weight) else "cpu")
        return state["step"]


def fusable(weight: Tensor) -> bool:
    """Returns whether torch's fused AdamW runs where this parameter lives."""
    return weight.device.type in ("cpu", "cuda") and weight.is_floating_point()
