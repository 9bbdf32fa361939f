"""Per-head numbers of one attention from d×d Gram matrices of its weights, and the logits they allow."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from qkeel.audit.scan.geometry import Geometry
from qkeel.audit.scan.weight_layouts import SitePlan, Slice
from qkeel.functional.bounds import gram_interaction_norms, gram_spectral_norm

Load = Callable[[str], Tensor | None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One attention of a checkpoint; one number per query head (a key head's stands at each of its queries).

    query_*, key_*: norms of W_Q and W_K [head_dim, inputs] (MLA: the up-projections, without the rope part).
    interaction_*: norms of W_Qᵀ W_K. logit_bound: no logit can be larger at any position, given the norm before the
    projections; NaN if none was found or if q or k are normed. interaction_bound: the same, tighter, where nothing
    rotates q against k (no RoPE, or a token with itself; for MLA it is logit_bound). gain_bound: the same from the
    gains of the q/k norm; NaN without one. outlier: see `outliers`. Logits in nats, before any cap, without what a
    position bias or a mask adds.
    """

    name: str  #: of the attention's module
    layout: str  #: how q and k lie in the weights, in words
    n_heads: int  #: query heads
    n_kv_heads: int  #: key heads
    head_dim: int  #: d, numbers of one head's query
    scale: float  #: the factor on q·k
    query_frobenius: tuple[float, ...]  #: ‖W_Q‖_F
    query_spectral: tuple[float, ...]  #: ‖W_Q‖₂
    key_frobenius: tuple[float, ...]  #: ‖W_K‖_F
    key_spectral: tuple[float, ...]  #: ‖W_K‖₂
    interaction_frobenius: tuple[float, ...]  #: ‖W_Qᵀ W_K‖_F
    interaction_spectral: tuple[float, ...]  #: ‖W_Qᵀ W_K‖₂
    interaction_bound: tuple[float, ...]
    logit_bound: tuple[float, ...]
    gain_bound: tuple[float, ...]
    query_gain_max: float | None = None  #: largest magnitude of the gain of q's norm; None without one
    key_gain_max: float | None = None  #: the same of k's norm
    outlier: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()  #: what the bounds rest on or leave out, in words


def grams(weight: Tensor, part: Slice) -> Tensor:
    """W_h W_hᵀ per head, [heads rows rows]: float64 for 32- and 64-bit weights, float32 for shorter ones.

    One head at a time, so that memory is that of one head; of the mirror image below the diagonal a quarter of the
    whole is copied instead of computed.
    """
    wide = torch.float64 if weight.dtype.itemsize >= 4 else torch.float32
    inner = weight.shape[1 - part.axis]
    rows = torch.empty(part.rows, inner, dtype=wide)
    found = rows.new_empty(len(part.starts), part.rows, part.rows)
    half = part.rows // 2
    for gram, start in zip(found, part.starts):
        end = start + part.rows
        rows.copy_(weight[start:end] if part.axis == 0 else weight[:, start:end].mT)
        torch.mm(rows[:half], rows.mT, out=gram[:half])
        gram[half:, half:] = rows[half:] @ rows[half:].mT
        gram[half:, :half] = gram[:half, half:].mT
    return found


def measure(plan: SitePlan, gram: Mapping[Slice, Tensor], load: Load, geometry: Geometry) -> SiteReport:
    """The report of a site whose Gram matrices are there; `load` reads a small tensor (gain, bias) by name."""
    share = plan.n_heads // plan.n_kv_heads
    a = gram[plan.query]
    b = gram[plan.key].repeat_interleave(share, 0)
    fine = a.isfinite().all(-1).all(-1) & b.isfinite().all(-1).all(-1)
    a, b = (torch.where(fine[:, None, None], x, 0) for x in (a, b))
    frobenius, spectral = gram_interaction_norms(a, b)
    scale = geometry.scale_of(plan.head_dim)
    query, key = gram_spectral_norm(a), gram_spectral_norm(b[::share]).repeat_interleave(share, 0)
    bounds = _Bounds(plan, gram, load, geometry, query, key)
    rotated = scale * geometry.rope_factor**2  # YaRN's stretch of cos and sin, on both sides

    def per_head(column: Tensor) -> tuple[float, ...]:
        return tuple(torch.where(fine, column, math.nan).tolist())

    return SiteReport(
        name=plan.name,
        layout=plan.layout,
        n_heads=plan.n_heads,
        n_kv_heads=plan.n_kv_heads,
        head_dim=plan.head_dim,
        scale=scale,
        query_frobenius=per_head(_trace_root(a)),
        query_spectral=per_head(query),
        key_frobenius=per_head(_trace_root(b)),
        key_spectral=per_head(key),
        interaction_frobenius=per_head(frobenius),
        interaction_spectral=per_head(spectral),
        interaction_bound=per_head(rotated * bounds.from_interaction(spectral)),
        logit_bound=per_head(rotated * bounds.from_weights(spectral)),
        gain_bound=per_head(rotated * bounds.from_gains()),
        query_gain_max=bounds.gain_max(plan.query_gain),
        key_gain_max=bounds.gain_max(plan.key_gain),
        notes=(*plan.notes, *bounds.notes(), *(() if fine.all() else ("some weights are NaN or infinite",))),
    )


def _trace_root(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()


@final
class _Bounds:
    """The longest query and key that norms allow, hence the largest logit.

    The input of a projection is g∘n + c with ‖n‖ ≤ √width (RMSNorm, LayerNorm), so no longer than
    ρ = √width · max|g| + ‖c‖, and ‖W x + b‖ ≤ ‖W‖₂ ρ + ‖b‖. A normed head is no longer than √d · max|g| + ‖c‖ (flat
    norm over all heads: √(heads · d) · max|g_h|). Rotation keeps lengths, so |q·k| ≤ ‖q‖ ‖k‖ holds at every offset.
    """

    def __init__(
        self, plan: SitePlan, gram: Mapping[Slice, Tensor], load: Load, geometry: Geometry, query: Tensor, key: Tensor
    ) -> None:
        self.plan, self.gram, self.load, self.geometry = plan, gram, load, geometry
        self.spectral = {"query": query, "key": key}
        self.share = plan.n_heads // plan.n_kv_heads

    def from_weights(self, interaction: Tensor) -> Tensor:
        """Largest |q·k|: ‖q‖ ‖k‖ of plain attention; of MLA ρ_q ρ_k ‖W_uqᵀ W_uk‖₂ + the rope part's lengths."""
        plan = self.plan
        if plan.query_gain or plan.key_gain:
            return torch.full_like(interaction, torch.nan)
        if plan.query_rope is None or plan.key_rope is None:
            return self._reach("query", plan.query) * self._reach("key", plan.key)
        nope = self.radius(plan.query_input) * self.radius(plan.key_input) * interaction
        q = gram_spectral_norm(self.gram[plan.query_rope]) * self.radius(plan.query_input)
        k = gram_spectral_norm(self.gram[plan.key_rope]) * self.radius(plan.rope_input)
        k = k + self._biases(plan.key_rope)
        return nope + (q + self._biases(plan.query_rope)) * k

    def from_interaction(self, interaction: Tensor) -> Tensor:
        """Largest |q·k| without rotation: ρ_q ρ_k ‖W_Qᵀ W_K‖₂ and what the biases add."""
        plan = self.plan
        if plan.query_gain or plan.key_gain or plan.query_rope is not None:
            return self.from_weights(interaction)
        q, k = self._reach("query", plan.query), self._reach("key", plan.key)
        wq, wk = (self.spectral[s] * self.radius(i) for s, i in (("query", plan.query_input), ("key", plan.key_input)))
        return self.radius(plan.query_input) * self.radius(plan.key_input) * interaction + (q * k - wq * wk)

    def from_gains(self) -> Tensor:
        """Largest |q·k| where q or k are normed; NaN where neither is."""
        if not (self.plan.query_gain or self.plan.key_gain) or self.plan.query_rope is not None:
            return torch.full_like(self.spectral["query"], torch.nan)
        q = self._normed(self.plan.query_gain, self.plan.n_heads) if self.plan.query_gain else None
        k = self._normed(self.plan.key_gain, self.plan.n_kv_heads) if self.plan.key_gain else None
        q = self._reach("query", self.plan.query) if q is None else q
        return q * (self._reach("key", self.plan.key) if k is None else k.repeat_interleave(self.share))

    def _reach(self, side: str, part: Slice) -> Tensor:
        name = self.plan.query_input if side == "query" else self.plan.key_input
        biases = self._biases(part)
        biases = biases.repeat_interleave(self.plan.n_heads // len(biases))
        return self.spectral[side] * self.radius(name) + biases

    def _biases(self, part: Slice) -> Tensor:
        """‖b_h‖ per head of the part."""
        if part.bias is None:
            return self.spectral["query"].new_zeros(len(part.starts))
        bias = self._vector(part.bias).to(self.spectral["query"].dtype)
        return torch.stack([bias[start : start + part.rows].norm() for start in part.starts])

    def _normed(self, gain: str, heads: int) -> Tensor:
        like = self.spectral["query"]
        g = self._gain(gain).to(like.dtype)
        offset = self._offset(gain, like)
        if g.numel() == heads * self.plan.head_dim and heads > 1:
            # One norm over all heads, or a bare parameter, which does not say; [heads, d] of a module: one per head.
            flat = g.ndim == 1 or not gain.endswith(".weight")
            width = g.numel() if flat else self.plan.head_dim
            c = offset.view(heads, -1).norm(dim=1) if offset.numel() == g.numel() else offset.norm()
            return width**0.5 * g.view(heads, -1).abs().amax(1) + c
        return (self.plan.head_dim**0.5 * g.abs().amax() + offset.norm()).expand(heads)

    def radius(self, gain: str | None) -> float:
        """ρ of the norm of that name; NaN if there is none."""
        if gain is None:
            return math.nan
        g = self._gain(gain).double()
        return g.numel() ** 0.5 * float(g.abs().amax()) + float(self._offset(gain, g).norm())

    def gain_max(self, gain: str | None) -> float | None:
        """Returns max|g|, or None without a gain."""
        return None if gain is None else float(self._gain(gain).abs().amax())

    def _gain(self, name: str) -> Tensor:
        return self._vector(name) + (1.0 if self.geometry.one_plus else 0.0)

    def _vector(self, name: str) -> Tensor:
        found = self.load(name)
        assert found is not None, name  # the plan names only what is there
        return found.double()

    def _offset(self, gain: str, like: Tensor) -> Tensor:
        bias = self.load(gain.removesuffix("weight") + "bias") if gain.endswith(".weight") else None
        return like.new_zeros(()) if bias is None else bias.to(like.dtype)

    def notes(self) -> list[str]:
        """Returns what was assumed, and why a bound is missing."""
        plan = self.plan
        found = []
        if self.geometry.model_type is None and (plan.query_input or plan.query_gain or plan.key_gain):
            found.append("no model_type: gains read as w, not 1 + w, and logits taken as divided by √head_dim")
        missing = [plan.query_input, plan.key_input, *([plan.rope_input] if plan.query_rope else [])]
        if not (plan.query_gain and plan.key_gain) and None in missing:
            found.append("no norm found before the projections: weights alone give no logit bound")
        if plan.query_rope is not None and (plan.query_gain or plan.key_gain):
            found.append("q/k norm on MLA: no bound given")
        return found


Z_SCORE = 3.5  # Iglewicz & Hoaglin 1993, "How to detect and handle outliers": modified z-score above 3.5
RATIO = 2.0  # and at least this many times the median: a tight checkpoint has no outliers


def outliers(sites: Sequence[SiteReport]) -> list[tuple[bool, ...]]:
    """Per site and head: ‖W_Qᵀ W_K‖₂ · scale far above the median of all heads, on a logarithmic scale.

    z = 0.6745 (ln x - median ln x) / median |ln x - median|; an outlier has z > 3.5 and x > 2 · median. NaN is one.
    """
    logs = [[_log(x * site.scale) for x in site.interaction_spectral] for site in sites]
    known = [x for row in logs for x in row if math.isfinite(x)]
    if not known:
        return [tuple(math.isnan(x) for x in row) for row in logs]
    middle = statistics.median(known)
    spread = max(statistics.median(abs(x - middle) for x in known), 1e-12)
    high = middle + max(Z_SCORE * spread / 0.6745, math.log(RATIO))
    return [tuple(math.isnan(x) or x > high for x in row) for row in logs]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan
