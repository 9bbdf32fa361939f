"""Fits the gains of an inserted norm, balances q against k, and folds scale factors into weights."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.functional.norms import widest
from qkeel.heads.site import AttentionSite, HeadSlice, across
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import parameters_of, submodules_of
from qkeel.remedies.apply import forget
from qkeel.remedies.base import where
from qkeel.remedies.change_norm import HeadNorm
from qkeel.remedies.change_spec import settle
from qkeel.remedies.retrofit.outputs import Reference, predictions
from qkeel.remedies.retrofit.replay import QueryRows, Replay
from qkeel.remedies.sigma_reparam import SigmaReparam, fold_layer, stored
from qkeel.sites.find import find_sites
from qkeel.spec import InverseSqrt, NoNorm
from qkeel.spec.norm import Norm

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
            norm, stored = module.spec.norm, [parameters_of(module).get(f"{side}_norm") for side in "qk"]
        gains = tuple(gain for gain in stored if gain is not None)
        if len(gains) != 2:
            raise RefusedError(
                f"{where(site)}: this norm has no gains of q and k to fit; use "
                "kind=rms or layer with gain=dim, head, head_dim, one_plus_dim or scalar"
            )
        self.gains = gains
        self.norm = norm if eps is None else norm.with_eps(eps)
        self.offset, self.per_head = float(norm.gain == "one_plus_dim"), norm.gain in ("head", "head_dim")
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
        query.copy_((factors / self.site.per_query_head(of_key))[:, None].expand_as(query))


@final
class Best:
    """The parameter values with the smallest distance so far, starting with the current values."""

    def __init__(self, parameters: Sequence[Tensor], measure: Callable[[], float]) -> None:
        self.parameters, self._measure = parameters, measure
        self._distance, self._values = measure(), copies(parameters)

    def offer(self) -> bool:
        """Measures the distance at the current values. Keeps them if it is smaller, or else restores the best values.

        Returns whether the current values were kept."""
        distance = self._measure()
        is_better = distance < (math.inf if math.isnan(self._distance) else self._distance)
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


def least_squares(old: Sequence[QueryRows], new: Sequence[QueryRows], *, shared: bool) -> Tensor:
    """Returns the factor a [h] of the derivation, or the ratio of the spreads if the covariance is not positive."""
    cov = var = spread = torch.zeros((), dtype=torch.float64)
    for old_rows, new_rows in zip(old, new):
        kind = widest(old_rows.visible.device)
        p = torch.where(old_rows.visible & old_rows.counted[..., None], old_rows.log_weights().exp(), 0.0).to(kind)
        z, x = (torch.where(old_rows.visible, r.logits.to(kind), 0.0) for r in (old_rows, new_rows))
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
    """Minimises a loss over these parameters by L-BFGS, and leaves no gradients on them."""

    def gradients() -> tuple[Tensor, Sequence[Tensor]]:
        loss = loss_of()
        return loss, torch.autograd.grad(loss, parameters)

    descend_along(parameters, gradients, iterations)


def descend_along(
    parameters: Sequence[nn.Parameter], gradients: Callable[[], tuple[Tensor, Sequence[Tensor]]], iterations: int
) -> None:
    """Minimises a loss by L-BFGS, given a function that returns the loss and its gradients."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        with torch.enable_grad():
            loss, gradients_of = gradients()
        for p, g in zip(parameters, gradients_of):
            p.grad = g
        return loss.detach()

    optimizer.step(closure)
    for p in parameters:
        p.grad = None


# Balancing queries against keys: an exact reparametrisation of the old model that reduces the cost of a norm.
#
# A norm divides each q and k by its length, which the old model may have used. How much the length varies from token to
# token depends on the relative scale of a head's dimensions, which can be chosen freely: with q_i · e^{t_i} and
# k_i · e^{-t_i} every product q·k is unchanged, for any t per dimension, and under RoPE for any t per rotated pair. So
# t and the gains are fitted together to the KL of the output, and e^{±t} is then multiplied into the rows of the q and
# k projections. There is one t per dimension (or pair) and key head, shared by the query heads of a group.

_SAME = 1e-4  # relative to the largest output: above float32 rounding, but far below the effect of a wrong pairing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ScaledRows:
    """Rows of a weight or bias that are multiplied by e^{sign · t}, where t belongs to site number `site`."""

    site: int
    heads: HeadSlice
    sign: float


@final
class Balance:
    """The numbers t of all sites, and the weights that they scale.

    `put()` writes the scaled weights, and `restore()` restores the old ones."""

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self.sites = [site for site in sites if _plain(model, site)]
        self._rows: dict[int, tuple[Tensor, list[_ScaledRows]]] = {}
        for i, site in enumerate(self.sites):
            for heads, sign in ((site.query[0], 1.0), (site.key[-1], -1.0)):
                for part in filter(None, (heads, heads.bias_of())):
                    p = model.get_parameter(part.parameter)
                    self._rows.setdefault(id(p), (p, []))[1].append(_ScaledRows(site=i, heads=part, sign=sign))
        self.weights = [p for p, _ in self._rows.values()]
        self._old = [p.detach().clone() for p in self.weights]
        self._pairs: list[Tensor] = []
        self.numbers: list[nn.Parameter] = []

    @classmethod
    def of(cls, reference: Reference, sites: Sequence[AttentionSite]) -> Balance | None:
        """Returns the balance of a model before its norm is added, or None if no pairing preserves its output."""
        balance = cls(reference.model, sites)
        for pairs in _PAIRINGS.values():
            if balance.sites and balance._leaves(reference, pairs):
                return balance
        return None

    @torch.no_grad()
    def _leaves(self, reference: Reference, pairs: Callable[[int], Tensor]) -> bool:
        """True if random values of t, shared according to this pairing, preserve the first batch's output."""
        self._begin(pairs)
        generator = torch.Generator().manual_seed(0)
        for t in self.numbers:
            t.copy_(torch.rand(t.shape, generator=generator) - 0.5)
        self.put()
        new = predictions(reference.model, reference.batches[0])
        self.restore()
        for t in self.numbers:
            t.zero_()
        old = reference.old[0]
        return bool((new - old).abs().max() <= _SAME * old.abs().max())

    def _begin(self, pairs: Callable[[int], Tensor]) -> None:
        self._pairs = [pairs(site.head_dim) for site in self.sites]
        weight = self.weights[0]
        self.numbers = [
            nn.Parameter(torch.zeros(site.n_kv_heads, int(p.max()) + 1, device=weight.device))
            for site, p in zip(self.sites, self._pairs)
        ]

    def scaled(self) -> list[Tensor]:
        """Returns the scaled weights as a function of the numbers t."""
        return [old * self._factor(p, rows) for old, (p, rows) in zip(self._old, self._rows.values())]

    def _factor(self, p: Tensor, rows: Sequence[_ScaledRows]) -> Tensor:
        axis = rows[0].heads.axis if p.ndim > 1 else 0
        lines = torch.ones(len(rows[0].heads.rows_of(p)), device=p.device, dtype=torch.float32)
        for scaled_rows in rows:
            t = self.numbers[scaled_rows.site][:, self._pairs[scaled_rows.site]]
            t = t if len(t) == scaled_rows.heads.n else self.sites[scaled_rows.site].per_query_head(t)
            lines = lines.index_put(
                (scaled_rows.heads.index.to(p.device).flatten(),), (scaled_rows.sign * t).exp().flatten()
            )
        return across(lines, axis, p).to(p.dtype)

    @torch.no_grad()
    def put(self) -> None:
        """Writes the scaled weights into the model."""
        put_back(self.weights, self.scaled())

    def restore(self) -> None:
        """Restores the old weights bit for bit."""
        put_back(self.weights, self._old)

    def descend(self, gains: Sequence[nn.Parameter], loss_of: Callable[[], Tensor], iterations: int) -> None:
        """Minimises a loss by L-BFGS over the numbers t and the gains jointly."""

        def gradients() -> tuple[Tensor, Sequence[Tensor]]:
            self.put()
            new, loss = self.scaled(), loss_of()
            grads = torch.autograd.grad(loss, [*self.weights, *gains])
            numbers = torch.autograd.grad(new, self.numbers, grads[: len(new)])
            return loss, (*numbers, *grads[len(new) :])

        descend_along([*self.numbers, *gains], gradients, iterations)
        self.put()


# Which dimensions of a head share a number t: without a rotation none do, otherwise the two dimensions of a pair.
_PAIRINGS: dict[str, Callable[[int], Tensor]] = {
    "none": torch.arange,
    "halves": lambda d: torch.arange(d) % max(d // 2, 1),
    "neighbours": lambda d: torch.arange(d) // 2,
}


def _plain(model: nn.Module, site: AttentionSite) -> bool:
    """True if one weight produces all of q, one weight produces all of k, and nothing else uses these weights."""
    if len(site.terms) != 1 or len(site.query) != 1 or len(site.key) != 1 or site.reparametrised:
        return False
    query, key = site.query[0], site.key[0]
    if (query.n, key.n) != (site.n_heads, site.n_kv_heads):
        return False
    if query.index.shape[1] != site.head_dim or key.index.shape[1] != site.head_dim:
        return False
    used = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return all(used[id(model.get_parameter(s.parameter))] == 1 for s in (query, key))


# Folding: multiplies scale factors into ordinary weights where this is exact.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The result of `fold`: the factors that it wrote into weights, and the factors that it kept, with the reasons."""

    written: tuple[str, ...]  #: one phrase per folded factor
    kept: tuple[str, ...]  #: one phrase per kept factor

    def __str__(self) -> str:
        return "\n".join([*(f"folded {line}" for line in self.written), *(f"kept {line}" for line in self.kept)])


@torch.no_grad()
def fold(model: nn.Module) -> Folded:
    """Writes scale factors back into weights in place. Outputs stay the same up to rounding.

    - In any model, Ŵ = (γ/σ) W of `sigma_reparam` becomes the weight of an ordinary layer again, unless another layer
      shares W. Pass the whole model, since layers outside it are not seen.
    - In qkeel's own modules, a logit scale other than 1/√d, constant or learned (`logit_scale`, a temperature), is
      moved into W_q and its bias, or, after a norm with a gain on q, into that gain. Position-dependent factors stay.

    The gains of a q/k norm are not folded, since the norm lies between the weights and the gain. Folding cannot be
    undone: handles of remedies that changed the spec of a folded site no longer have any effect.

    Raises:
        RefusedError: nothing can be folded. The message says why.

    Example:
        >>> from qkeel import apply
        >>> from qkeel.nn import Attention
        >>> attention = Attention(16, 4)
        >>> handle = apply(attention, "sigma_reparam")
        >>> fold(attention).written[0]
        'sigma_reparam of q_proj'
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module to fold, got {type(model).__name__}")
    inner_model = unwrapped(model)
    written, kept = _fold_scaled_layers(inner_model)
    if written and not kept:  # otherwise the handle still has layers to restore
        forget(inner_model, lambda remedy: isinstance(remedy, SigmaReparam))
    for site in find_sites(inner_model) if any(isinstance(m, SpecModule) for m in inner_model.modules()) else ():
        reason = _fold_scale(inner_model, site)
        (kept if reason else written).extend([f"{where(site)}: {reason or 'its scale'}"] if reason is not None else [])
    if not written:
        raise RefusedError(
            "nothing to fold: "
            + ("; ".join(kept) or "no layer under sigma_reparam, and no scale other than 1/√d in qkeel's own attention")
        )
    return Folded(written=tuple(written), kept=tuple(kept))


def _fold_scaled_layers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Folds the layers under sigma_reparam whose weights nothing else uses. Returns phrases for these and for the
    others."""
    written, kept, held = list[str](), list[str](), _holders(model)
    for name, layer in list(model.named_modules()):  # folding removes modules
        phrase, weights = f"sigma_reparam of {name or 'the model'}", stored(layer)
        if not weights:
            continue
        other_holders = {n: m for p in weights.values() for n, m in held[id(p)].items() if m is not layer}
        if other_holders:
            kept.append(
                f"{phrase}: {', '.join(n or 'the model' for n in other_holders)} shares its weight and would change "
                "too; give the layer a weight of its own before the remedy is applied, or remove() the handle"
            )
        else:
            fold_layer(layer)
            written.append(phrase)
    return written, kept


def _holders(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """Returns the modules that hold each parameter, by id of the parameter and name of the module.

    A module with several names is one module. A layer whose weight is computed from the parameter holds it."""
    holders: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        owner = _owner(name)
        for p in parameters_of(module).values():
            if p is not None:
                holders.setdefault(id(p), {})[owner] = model.get_submodule(owner)
    return holders


def _owner(name: str) -> str:
    """Returns the name of a module, or of the layer if the module is one of a layer's parametrizations."""
    return f".{name}".partition(".parametrizations.")[0].removeprefix(".")


def _fold_scale(model: nn.Module, site: AttentionSite) -> str | None:
    """Returns None if the scale is 1/√d, "" if it was folded, or else the reason why it was not folded."""
    module = site.module
    assert isinstance(module, SpecModule)
    spec, d = module.spec, module.head_dim
    inner = spec.scale.base
    norm = spec.norm if "q" in spec.norm.sides else NoNorm()
    if inner == InverseSqrt():
        if norm.sides in ("", "q") or norm.gain == "none":
            return None
        return f"the gains of {norm.formula()} come after a norm, which undoes any scaling of weights"
    if norm.sides and norm.gain == "none":
        return "q is normed without a gain, which cancels any scaling of its weights"
    if inner.follows_position:
        return f"{inner.formula()} depends on the position"
    factor = inner.factor(torch.zeros(1, 1), d, module.spec_params())
    ratio = (torch.as_tensor(factor, dtype=torch.float64) * math.sqrt(d)).flatten().expand(site.n_heads)
    reason = _into_gain(module, norm, ratio) if norm.sides else _into_weights(model, site, ratio)
    if reason:
        return reason
    parameters_of(module).pop("logit_scale", None)
    module.spec = spec.replace(scale=spec.scale.with_base(InverseSqrt()))
    settle(module)
    forget(module, lambda remedy: remedy.changes_spec)
    return ""


def _into_weights(model: nn.Module, site: AttentionSite, ratio: Tensor) -> str:
    """Multiplies q's last weight in each term, and its bias, by a factor per query head.

    Returns the reason if this is not possible, or else ""."""
    pieces: list[HeadSlice] = [term.query[-1] for term in site.terms]
    if site.reparametrised:
        return "W_q is computed from another weight"
    other_slices = [
        s
        for other_site in find_sites(model)
        if other_site.module is not site.module
        for s in (*other_site.query, *other_site.key)
    ]
    owned = {id(model.get_parameter(s.parameter)) for s in other_slices}
    for piece in pieces:
        if id(model.get_parameter(piece.parameter)) in owned:
            return f"{piece.parameter} is shared with another attention layer"
    held = _holders(model)
    for piece in pieces:
        if len(held[id(model.get_parameter(piece.parameter))]) > 1:
            return f"{piece.parameter} is shared with another layer"
    for piece in pieces:
        for part in filter(None, (piece, piece.bias_of())):
            p = model.get_parameter(part.parameter)
            rows = part.lines(ratio.to(p.device, widest(p.device)), p.shape[0])
            p.copy_(p.to(rows.dtype) * (rows[:, None] if p.ndim > 1 else rows))
    return ""


def _into_gain(module: SpecModule, norm: Norm, ratio: Tensor) -> str:
    """Multiplies the gain of q by a factor per query head. Returns the reason if this is not possible, or else ""."""
    if norm.shared:
        return "q and k share one gain"
    per_head = norm.gain in ("head", "head_dim")
    if not per_head and bool((ratio != ratio[0]).any()):
        return f"a scale per head does not fit into gain={norm.gain}, which heads share"
    gain, by = module.get_parameter("q_norm"), ratio[:, None] if per_head else ratio[0]
    offset = 1.0 if norm.gain == "one_plus_dim" else 0.0
    by = by.to(gain.device, widest(gain.device))
    gain.copy_((gain.to(by.dtype) + offset) * by - offset)
    if norm.bias:
        bias = module.get_parameter("q_norm_bias")
        bias.copy_(bias.to(by.dtype) * by)
    return ""
