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

import dataclasses
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.module_tables import parameters_of, submodules_of
from qkeel.remedies.attention.projection_norms import HeadNorm
from qkeel.remedies.base import where
from qkeel.remedies.retrofit.replay import Rows, divergence, mean
from qkeel.sites.site import AttentionSite
from qkeel.spec.norm import GainNorm

Replay = Callable[[], list[Rows]]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gains:
    """The two gains of a site as they are stored; `one`: what is added to them before they multiply."""

    query: nn.Parameter
    key: nn.Parameter
    one: float
    per_head: bool

    @classmethod
    def of(cls, site: AttentionSite) -> Gains:
        """Those of a site that has just been normed."""
        module = site.module
        if isinstance(module, SpecModule):
            norm, stored = module.spec.norm, [parameters_of(module).get(f"{s}_norm") for s in "qk"]
        else:
            held = [submodules_of(module).get(f"{s}_norm") for s in "qk"]
            norms = [n for n in held if isinstance(n, HeadNorm)]
            norm, stored = (norms[0].norm if norms else None), [n.weight for n in norms]
        query, key = stored if len(stored) == 2 else (None, None)
        if not isinstance(norm, GainNorm) or query is None or key is None:
            raise RefusedError(
                f"{where(site)}: this norm has no gain of q and of k that could be fitted; use "
                "kind=rms or layer with gain=dim, head, head_dim, one_plus_dim or scalar"
            )
        one, per_head = float(norm.gain == "one_plus_dim"), norm.gain in ("head", "head_dim")
        return cls(query=query, key=key, one=one, per_head=per_head)

    @torch.no_grad()
    def put(self, factors: Tensor) -> None:
        """Constant gains whose product is `factors` [h] (all equal unless per_head)."""
        if not self.per_head:
            root = factors[0].sqrt()
            self.query.fill_(float(root - self.one))
            self.key.fill_(float(root - self.one))
            return
        groups = self.key.shape[0]
        key = factors.unflatten(0, (groups, -1)).log().mean(1).mul(0.5).exp()
        query = factors / key.repeat_interleave(len(factors) // groups)
        self.key.copy_(key[:, None].expand_as(self.key))
        self.query.copy_(query[:, None].expand_as(self.query))


def fit(gains: Gains, old: Sequence[Rows], replay: Replay, *, iterations: int) -> None:
    """Set the gains: least squares, then `iterations` of L-BFGS on the KL; never worse than it was."""
    start, began = _values(gains), _loss(old, replay)
    gains.put(least_squares(old, _now(replay), shared=not gains.per_head))
    solved, after = _values(gains), _loss(old, replay)
    best, least = (solved, after) if after < began else (start, began)
    if iterations:
        _restore(gains, best)

        def divergences() -> Tensor:
            return mean(divergence(a, b).mean() for a, b in zip(old, replay()))

        descend([gains.query, gains.key], divergences, iterations)
        fitted, loss = _values(gains), _loss(old, replay)
        best = fitted if loss < least else best
    _restore(gains, best)


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
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        with torch.enable_grad():
            loss = loss_of()
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = g
        return loss.detach()

    optimizer.step(closure)
    for p in parameters:
        p.grad = None


@torch.no_grad()
def _now(replay: Replay) -> list[Rows]:
    return replay()


def _loss(old: Sequence[Rows], replay: Replay) -> float:
    with torch.no_grad():
        loss = float(mean(divergence(a, b).mean() for a, b in zip(old, replay())))
    return loss if loss == loss else float("inf")


def _values(gains: Gains) -> tuple[Tensor, Tensor]:
    return gains.query.detach().clone(), gains.key.detach().clone()


@torch.no_grad()
def _restore(gains: Gains, values: tuple[Tensor, Tensor]) -> None:
    gains.query.copy_(values[0])
    gains.key.copy_(values[1])
