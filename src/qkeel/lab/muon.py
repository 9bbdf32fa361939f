"""Muon: the momentum of each hidden matrix is orthogonalised; all other parameters get AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from qkeel.functional.bounds import newton_schulz
from qkeel.patching.optimizers import Group

# From Moonlight: gives updates the root mean square that AdamW's updates usually have.
RMS_MATCH = 0.2


@final
class Muon(torch.optim.Optimizer):
    """W ← W - lr·(0.2·√max(m, n)·O + λ·W) with O = Newton-Schulz(Nesterov momentum); other groups use AdamW.

    Groups with `muon=True` contain matrices; every other group, including groups added later, uses AdamW. The same
    learning rate suits both, thanks to the factor 0.2·√max(m, n). Newton-Schulz runs in float32 on CPUs, where bfloat16
    is emulated. The step is linear in the rate.

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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, {**defaults, "muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            # The closure computes gradients, which `no_grad` above would prevent.
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            # A remedy may add its own scale or gain, which is not a matrix, to any group.
            matrices = [p for p in weights if group["muon"] and p.ndim == 2]
            vectors = [p for p in weights if not group["muon"] or p.ndim != 2]
            if matrices:
                self._orthogonal(matrices, group)
            if vectors:
                self._adamw(vectors, group)
        return loss

    def _orthogonal(self, weights: list[Tensor], group: Group) -> None:
        for weight in weights:
            assert weight.grad is not None
            momentum = self._buffer(weight, "momentum")
            # An average where Jordan's momentum is a sum: the factor between them does not survive Newton-Schulz.
            momentum.lerp_(weight.grad, 1 - group["momentum"])
            update = newton_schulz(weight.grad.lerp(momentum, group["momentum"]))
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(
                update, alpha=-group["lr"] * RMS_MATCH * max(weight.shape) ** 0.5
            )

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
            # The fused step wants its count on the device of the weight, others on the CPU.
            state["step"] = torch.zeros(
                (), device=weight.device if fusable(weight) else "cpu"
            )
        return state["step"]


def fusable(weight: Tensor) -> bool:
    """True if torch's fused AdamW supports this parameter."""
    return weight.device.type in ("cpu", "cuda") and weight.is_floating_point()
