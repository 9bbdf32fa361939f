"""Fits the gains of an inserted norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.functional.norms import widest
from qkeel.heads.site import AttentionSite
from qkeel.nn.attention import SpecModule
from qkeel.patching.modes import parameters_of, submodules_of
from qkeel.remedies.base import where
from qkeel.remedies.change_norm import HeadNorm
from qkeel.remedies.retrofit.replay import QueryRows, Replay
from qkeel.spec import NoNorm

# Fitting: finds gains of a new norm with which the logits are as close to those of the old model as the norm allows.
#
# Derivation. Let z be the old logits of a row, p = softmax(z), and z' the new logits. To second order in z' - z,
#
#     KL(p ‖ softmax(z')) = ½ Var_p(z' - z),
#
# since a constant per row does not change a softmax, and keys count in proportion to their attention. With one factor a
# on the normed logits ẑ (gains whose product is a) this is a least-squares problem with the solution
#
#     a = Σ_rows Cov_p(z, ẑ) / Σ_rows Var_p(ẑ),
#
# per head if gains are per head, or else over all heads. This is the starting point. A gain per dimension before RoPE
# rotates with its pair, so that z' is no longer linear in the two gains. From the starting point, L-BFGS therefore
# minimises the KL itself, summed over rows, through the model's own rotation, whichever dimensions it pairs. In this
# sum, attention that hardly affects the output counts as much as attention that matters. In the end, all gains are
# therefore fitted together, by L-BFGS on the KL of the model's output.


@final
class InsertedNorm:
    """The norm that has just been inserted at a site.

    `gains` are the stored gains of q and of k. `offset` is the number that is added to them before they are multiplied.

    Args:
        site: the site.
        eps: the norm's new eps, or None to keep its current eps.

    Raises:
        RefusedError: the norm lacks a gain of q or of k.
    """

    def __init__(self, site: AttentionSite, eps: float | None) -> None:
        self.site, module = site, site.module
        children = [submodules_of(module).get(f"{side}_norm") for side in "qk"]
        heads = [child for child in children if isinstance(child, HeadNorm)]
        stored = [head.weight for head in heads]
        norm = heads[0].norm if heads else NoNorm()
        if isinstance(module, SpecModule):
            norm, stored = (
                module.spec.norm,
                [parameters_of(module).get(f"{side}_norm") for side in "qk"],
            )
        gains = tuple(gain for gain in stored if gain is not None)
        if len(gains) != 2:
            raise RefusedError(
                f"{where(site)}: this norm has no gains of q and k to fit; use "
                "kind=rms or layer with gain=dim, head, head_dim, one_plus_dim or scalar"
            )
        self.gains = gains
        self.norm = norm if eps is None else norm.with_eps(eps)
        self.offset, self.per_head = (
            float(norm.gain == "one_plus_dim"),
            norm.gain in ("head", "head_dim"),
        )
        for head in heads:
            head.norm = self.norm
        if isinstance(module, SpecModule):
            module.spec = module.spec.replace(norm=self.norm)

    @torch.no_grad()
    def put(self, factors: Tensor) -> None:
        """Sets constant gains whose products are `factors` [h], which must all be equal unless `per_head`."""
        query, key = self.gains
        if not self.per_head:
            root = float(factors[0].sqrt() - self.offset)
            query.fill_(root)
            key.fill_(root)
            return
        users = self.site.users(key.shape[0]).to(factors.device)
        of_key = factors[users].log().mean(1).mul(0.5).exp()
        key.copy_(of_key[:, None].expand_as(key))
        query.copy_(
            (factors / self.site.per_query_head(of_key))[:, None].expand_as(query)
        )


@final
class Best:
    """The parameter values with the smallest distance so far, starting with the current values."""

    def __init__(
        self, parameters: Sequence[Tensor], measure: Callable[[], float]
    ) -> None:
        self.parameters, self._measure = parameters, measure
        self._distance, self._values = measure(), copies(parameters)

    def offer(self) -> bool:
        """Measures the distance at the current values. Keeps them if it is smaller, or else restores the best values.

        Returns whether the current values were kept."""
        distance = self._measure()
        is_better = distance < (
            math.inf if math.isnan(self._distance) else self._distance
        )
        if is_better:
            self._distance, self._values = distance, copies(self.parameters)
        else:
            put_back(self.parameters, self._values)
        return is_better


def copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns detached copies of the parameters' values."""
    return [p.detach().clone() for p in parameters]


@torch.no_grad()
def put_back(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into parameters bit for bit."""
    for p, value in zip(parameters, values):
        p.copy_(value)


def fit(norm: InsertedNorm, replay: Replay, *, iterations: int) -> None:
    """Fits the gains by least squares, then by `iterations` of L-BFGS on the KL. It never makes the KL worse."""

    def loss() -> Tensor:
        return replay.divergence().mean()

    @torch.no_grad()
    def measure() -> float:
        return float(loss())

    best = Best(norm.gains, measure)
    with torch.no_grad():
        factors = least_squares(replay.old, replay.rows(), shared=not norm.per_head)
    norm.put(factors)
    best.offer()
    if iterations:
        descend(norm.gains, loss, iterations)
        best.offer()


def least_squares(
    old: Sequence[QueryRows], new: Sequence[QueryRows], *, shared: bool
) -> Tensor:
    """Returns the factor a [h] of the derivation, or the ratio of the spreads if the covariance is not positive."""
    cov = var = spread = torch.zeros((), dtype=torch.float64)
    for old_rows, new_rows in zip(old, new):
        kind = widest(old_rows.visible.device)
        p = torch.where(
            old_rows.visible & old_rows.counted[..., None],
            old_rows.log_weights().exp(),
            0.0,
        ).to(kind)
        z, x = (
            torch.where(old_rows.visible, r.logits.to(kind), 0.0)
            for r in (old_rows, new_rows)
        )
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


def descend(
    parameters: Sequence[nn.Parameter], loss_of: Callable[[], Tensor], iterations: int
) -> None:
    """Minimises a loss over these parameters by L-BFGS, and leaves no gradients on them."""

    def gradients() -> tuple[Tensor, Sequence[Tensor]]:
        loss = loss_of()
        return loss, torch.autograd.grad(loss, parameters)

    descend_along(parameters, gradients, iterations)


def descend_along(
    parameters: Sequence[nn.Parameter],
    gradients: Callable[[], tuple[Tensor, Sequence[Tensor]]],
    iterations: int,
) -> None:
    """Minimises a loss by L-BFGS, given a function that returns the loss and its gradients."""
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        with torch.enable_grad():
            loss, gradients_of = gradients()
        for p, g in zip(parameters, gradients_of):
            p.grad = g
        return loss.detach()

    optimizer.step(closure)
    for p in parameters:
        p.grad = None
