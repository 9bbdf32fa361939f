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
import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.functional.norms import widest
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.module_tables import parameters_of, submodules_of
from qkeel.remedies.attention.projection_norms import HeadNorm
from qkeel.remedies.base import where
from qkeel.remedies.retrofit.predictions import Gap
from qkeel.remedies.retrofit.replay import Replay, Rows
from qkeel.spec import NoNorm
from qkeel.spec.norm import Norm, Part
from qkeel.spec.slot import Geometry, Parameter, Params


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlendedNorm(Norm):
    """The norm slot of an own module while its norm is blended in: (1 - s) x + s norm(x), s the share."""

    inner: Norm
    share: float

    @property
    def sides(self) -> str:
        """Those of the norm that is blended in."""
        return self.inner.sides

    def apply(self, part: Part, x: Tensor, params: Params) -> Tensor:
        return torch.lerp(x, self.inner.apply(part, x, params), self.share)

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        return self.inner.parameters(geometry)

    def formula(self) -> str:
        return f"{1 - self.share:g} of q, k and {self.share:g} of {self.inner.formula()}"


@final
class SiteNorm(Handle):
    """The norm of a site that has just been normed; `remove()` leaves the whole of it in force.

    `gains` are those of q and of k as they are stored, `one` is what is added to them before they multiply.

    Args:
        eps: that of the norm from now on; None leaves it as it is.

    Raises:
        RefusedError: the norm has no gain of q and of k.
    """

    def __init__(self, site: AttentionSite, eps: float | None) -> None:
        self.site, module = site, site.module
        self._own = module if isinstance(module, SpecModule) else None
        found = [submodules_of(module).get(f"{side}_norm") for side in "qk"]
        self._heads = [norm for norm in found if isinstance(norm, HeadNorm)]
        stored = [norm.weight for norm in self._heads]
        norm = self._heads[0].norm if self._heads else NoNorm()
        if self._own is not None:
            norm, stored = self._own.spec.norm, [parameters_of(module).get(f"{side}_norm") for side in "qk"]
        gains = tuple(gain for gain in stored if gain is not None)
        if len(gains) != 2:
            raise RefusedError(
                f"{where(site)}: this norm has no gain of q and of k that could be fitted; use "
                "kind=rms or layer with gain=dim, head, head_dim, one_plus_dim or scalar"
            )
        self.gains = gains
        self.norm = norm if eps is None else norm.with_eps(eps)
        self.one, self.per_head = float(norm.gain == "one_plus_dim"), norm.gain in ("head", "head_dim")
        for head in self._heads:
            head.norm = self.norm
        self.set(1.0)
        super().__init__(self._end)

    def set(self, share: float) -> None:
        """From now on this share of the norm."""
        if self._own is not None:
            norm = self.norm if share == 1 else BlendedNorm(inner=self.norm, share=share)
            self._own.spec = self._own.spec.replace(norm=norm)
        for head in self._heads:
            head.blend(share)

    def _end(self) -> None:
        self.set(1.0)
        for head in self._heads:
            head.share = None

    @torch.no_grad()
    def put(self, factors: Tensor) -> None:
        """Constant gains whose product is `factors` [h] (all equal unless per_head)."""
        query, key = self.gains
        if not self.per_head:
            root = float(factors[0].sqrt() - self.one)
            query.fill_(root)
            key.fill_(root)
            return
        users = self.site.users(key.shape[0]).to(factors.device)
        of_key = factors[users].log().mean(1).mul(0.5).exp()
        key.copy_(of_key[:, None].expand_as(key))
        query.copy_((factors / self.site.per_query_head(of_key))[:, None].expand_as(query))


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
        kind = widest(one.visible.device)
        p = torch.where(one.visible & one.counted[..., None], one.log_weights().exp(), 0.0).to(kind)
        z, x = (torch.where(one.visible, r.logits.to(kind), 0.0) for r in (one, two))
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
