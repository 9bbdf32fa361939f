"""Gains of a new norm set so that the logits are those of the model without it, as closely as the norm allows.

Derivation. With z the old logits of a row, p = softmax(z) and z' the new ones, to second order in z' - z

    KL(p ‖ softmax(z')) = ½ Var_p(z' - z):

a constant per row is nothing to a softmax, and keys count as they are attended to. With one factor a on the normed
logits ẑ (gains that multiply to a) that is least squares with the solution

    a = Σ_rows Cov_p(z, ẑ) / Σ_rows Var_p(ẑ),

per head where gains are per head, over all heads where they share them. It is the start. A gain per dimension before
RoPE turns with its pair, so z' is no longer linear in the two gains; the KL itself, summed over rows, is minimised
from there by L-BFGS through the model's own rotation, whichever dimensions it pairs. Attention that matters little
to the output counts there as much as attention that matters; so all gains are then fitted at once by L-BFGS to the KL
of the model's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.remedies.retrofit.predictions import Gap
from qkeel.remedies.retrofit.replay import Replay, Rows
from qkeel.remedies.retrofit.site_norm import SiteNorm


@final
class Best:
    """The values of some parameters at which a gap was least so far, from those they have when this is made."""

    def __init__(self, parameters: Sequence[Tensor], measure: Callable[[], Gap]) -> None:
        self.parameters, self._measure = parameters, measure
        self.gap, self._values = measure(), copies(parameters)

    def offer(self) -> bool:
        """Measure the values of now, and take them if they are better; else put the best ones back."""
        gap = self._measure()
        better = gap.kl < (math.inf if math.isnan(self.gap.kl) else self.gap.kl)
        if better:
            self.gap, self._values = gap, copies(self.parameters)
        else:
            put_back(self.parameters, self._values)
        return better


def copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The values of now."""
    return [p.detach().clone() for p in parameters]


@torch.no_grad()
def put_back(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into parameters, bit for bit."""
    for p, value in zip(parameters, values):
        p.copy_(value)


def fit(norm: SiteNorm, replay: Replay, *, iterations: int) -> None:
    """Set the gains: least squares, then `iterations` of L-BFGS on the KL; never worse than it was."""

    def loss() -> Tensor:
        return replay.divergence().mean()

    @torch.no_grad()
    def measure() -> Gap:
        return Gap(kl=float(loss()), loss=None)

    best = Best(norm.gains, measure)
    with torch.no_grad():
        factors = least_squares(replay.old, replay.rows(), shared=not norm.per_head)
    norm.put(factors)
    best.offer()
    if iterations:
        descend(norm.gains, loss, iterations)
        best.offer()


def least_squares(old: Sequence[Rows], new: Sequence[Rows], *, shared: bool) -> Tensor:
    """The a [h] of the derivation; where it is not positive, the ratio of the spreads instead."""
    cov = var = spread = torch.zeros((), dtype=torch.float64)
    for one, two in zip(old, new):
        p = torch.where(one.visible & one.counted[..., None], one.log_weights().exp(), 0.0).double()
        z, x = (torch.where(one.visible, r.logits.double(), 0.0) for r in (one, two))
        z, x = (v - (p * v).sum(-1, keepdim=True) for v in (z, x))
        cov = cov + (p * z * x).sum((0, 2, 3)).cpu()
        var = var + (p * x * x).sum((0, 2, 3)).cpu()
        spread = spread + (p * z * z).sum((0, 2, 3)).cpu()
    if shared:
        heads = cov.shape[0]
        cov, var, spread = (v.sum().expand(heads) for v in (cov, var, spread))
    tiny = torch.finfo(torch.float64).tiny
    a = torch.where(cov > 0, cov, (spread * var).sqrt()) / var.clamp_min(tiny)
    return torch.where(a > 0, a, 1.0).clamp(1e-4, 1e4)


def descend(parameters: Sequence[nn.Parameter], loss_of: Callable[[], Tensor], iterations: int) -> None:
    """L-BFGS on a loss by these parameters alone; their gradients are left empty."""

    def gradients() -> tuple[Tensor, Sequence[Tensor]]:
        loss = loss_of()
        return loss, torch.autograd.grad(loss, parameters)

    descend_along(parameters, gradients, iterations)


def descend_along(
    parameters: Sequence[nn.Parameter], gradients: Callable[[], tuple[Tensor, Sequence[Tensor]]], iterations: int
) -> None:
    """The same where the loss comes with its gradients by the parameters."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        with torch.enable_grad():
            loss, found = gradients()
        for p, g in zip(parameters, found):
            p.grad = g
        return loss.detach()

    optimizer.step(closure)
    for p in parameters:
        p.grad = None
