"""Per-head numbers of one attention layer of a checkpoint, from Gram matrices of its weights, and the logits that they
allow.

The input of a projection is g∘n + c with ‖n‖ ≤ √width (RMSNorm, LayerNorm), so its L2 norm is at most ρ = √width ·
max|g| + ‖c‖, and ‖W x + b‖ ≤ ‖W‖₂ ρ + ‖b‖. A normed head has an L2 norm of at most √d · max|g| + ‖c‖ (a flat norm
over all heads: √(heads · d) · max|g_h|). Rotation preserves L2 norms, so |q·k| ≤ ‖q‖ ‖k‖ holds at every offset.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from qkeel.audit.checkpoint_config import VERIFIED, Geometry
from qkeel.audit.checkpoint_heads import SitePlan, Slice
from qkeel.functional.bounds import gram_interaction_norms, gram_spectral_norm

Load = Callable[[str], Tensor | None]

# Over what float32 may round off: sums of thousands of squares and eigenvalues of hundreds of rows came out too small by
# at most 1e-6.
SINGLE_MARGIN = 1 + 1e-4


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One attention layer of a checkpoint, with one value per query head (a key head's value is repeated for its query
    heads).

    query_*, key_*: norms of W_Q and W_K [head_dim, inputs] (MLA: the up-projections, without the rope part; of two
    streams of tokens that see each other, those of the first).
    interaction_*: norms of W_Qᵀ W_K. logit_bound: no logit can exceed it at any position, given the norm before the
    projections; NaN if there is no such norm or if q or k are normed. gain_bound: a bound from the gains of the q/k norm;
    NaN if there is no such norm. outlier: see `outliers`. Logits are in nats, before any cap, without position biases or
    additive masks.
    """

    name: str  #: name of the attention's module
    layout: str  #: arrangement of q and k in the weights
    n_heads: int  #: query heads
    n_kv_heads: int  #: key heads
    head_dim: int  #: d, the width of one head's query
    scale: float  #: the factor on q·k
    query_frobenius: tuple[float, ...]  #: ‖W_Q‖_F
    query_spectral: tuple[float, ...]  #: ‖W_Q‖₂
    key_frobenius: tuple[float, ...]  #: ‖W_K‖_F
    key_spectral: tuple[float, ...]  #: ‖W_K‖₂
    interaction_frobenius: tuple[float, ...]  #: ‖W_Qᵀ W_K‖_F
    interaction_spectral: tuple[float, ...]  #: ‖W_Qᵀ W_K‖₂
    logit_bound: tuple[float, ...]
    gain_bound: tuple[float, ...]
    outlier: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()  #: gaps of the bounds, with their reasons
    assumed: tuple[
        str, ...
    ] = ()  #: conventions that the bounds rest on, and that nothing in the checkpoint confirms

    def bounds(self) -> list[float]:
        """Returns the bound on the logits of each head, from gains if q and k are normed; NaN where there is none."""
        return [
            gain if math.isfinite(gain) else bound
            for gain, bound in zip(self.gain_bound, self.logit_bound)
        ]


def grams(weight: Tensor, weight_slice: Slice) -> Tensor:
    """Returns W_h W_hᵀ per head, [heads rows rows]: float64 for 32- and 64-bit weights, else float32.

    Works on one head at a time to bound memory.
    """
    # Products of two 16-bit numbers are exact in float32.
    wide = torch.float64 if weight.dtype.itemsize >= 4 else torch.float32
    products = torch.empty(
        len(weight_slice.starts), weight_slice.rows, weight_slice.rows, dtype=wide
    )
    inner = weight.shape[1 - weight_slice.axis]
    rows = torch.empty(weight_slice.rows, inner, dtype=wide)
    for product, start in zip(products, weight_slice.starts):
        end = start + weight_slice.rows
        rows.copy_(
            weight[start:end] if weight_slice.axis == 0 else weight[:, start:end].mT
        )
        torch.mm(rows, rows.mT, out=product)
    return products


def measure(
    plan: SitePlan, gram: Mapping[Slice, Tensor], load: Load, geometry: Geometry
) -> SiteReport:
    """Returns the report of a site from its Gram matrices; `load` reads a small tensor (gain, bias) by name."""
    heads, query, key = plan.n_heads, plan.query, plan.key
    finite = torch.ones(heads, dtype=torch.bool)
    # Of 16-bit weights the matrices are float32, in which eigenvalues take half the time. The bound of latent attention
    # is a norm of the product of the matrices, which may be far smaller than they are.
    is_single = query.rope is None and all(
        products.dtype == torch.float32 for products in gram.values()
    )
    dtype, margin = (torch.float32, SINGLE_MARGIN) if is_single else (torch.float64, 1)
    wide, frobenius, spectral = {}, {}, {}
    for weight_slice in plan.slices():
        # A head that is not finite must not hide the others, so it is left out and marked in the end.
        is_finite = gram[weight_slice].isfinite().flatten(1).all(1)
        products = torch.where(is_finite[:, None, None], gram[weight_slice], 0)
        products = products.to(dtype)
        traces = products.diagonal(dim1=1, dim2=2).sum(1).clamp_min(0)
        # Query heads that use one key head.
        share = heads // len(weight_slice.starts)
        wide[weight_slice] = products.repeat_interleave(share, 0)
        spectral[weight_slice], frobenius[weight_slice] = (
            norms.double().repeat_interleave(share)
            for norms in (gram_spectral_norm(products), traces.double().sqrt())
        )
        finite &= is_finite.repeat_interleave(share)
    of_product, interaction = gram_interaction_norms(
        wide[query.weight], wide[key.weight]
    )
    lengths = _Lengths(plan, spectral, load, geometry)
    logit_bound, gain_bound, note = lengths.bounds(interaction.double())
    scale = geometry.scale_of(plan.head_dim)
    # YaRN scales cos and sin of both sides.
    rotated = scale * geometry.rope_factor**2

    def per_head(column: Tensor) -> tuple[float, ...]:
        return tuple(torch.where(finite, column.expand(heads), math.nan).tolist())

    notes = [plan.note or note, "" if finite.all() else "some weights are not finite"]
    kind, assumed = geometry.model_type, list(plan.assumed)
    has_bound = any(side.input or side.gain for side in (query, key))
    if has_bound and kind not in VERIFIED:
        assumed.append(
            "no model_type: norms taken to precede attention, gains read as w, logits divided by √head_dim"
            if kind is None
            else f"the bounds of the model type {kind} have not been compared with the logits of its code"
        )
    return SiteReport(
        name=plan.name,
        layout=plan.layout,
        n_heads=heads,
        n_kv_heads=plan.n_kv_heads,
        head_dim=plan.head_dim,
        scale=scale,
        query_frobenius=per_head(frobenius[query.weight]),
        query_spectral=per_head(spectral[query.weight]),
        key_frobenius=per_head(frobenius[key.weight]),
        key_spectral=per_head(spectral[key.weight]),
        interaction_frobenius=per_head(of_product),
        interaction_spectral=per_head(interaction),
        logit_bound=per_head(rotated * logit_bound * margin),
        gain_bound=per_head(rotated * gain_bound),
        notes=tuple(filter(None, notes)),
        assumed=tuple(assumed),
    )


@final
class _Lengths:
    """How long the queries and keys of each head can be, before the scale, and so their products."""

    def __init__(
        self,
        plan: SitePlan,
        spectral: Mapping[Slice, Tensor],
        load: Load,
        geometry: Geometry,
    ) -> None:
        self.plan, self.spectral, self.load = plan, spectral, load
        self.offset = 1.0 if geometry.one_plus else 0.0

    def bounds(self, interaction: Tensor) -> tuple[Tensor, Tensor, str]:
        """Returns the bound from weights, the bound from gains, and why there is none.

        `interaction` is ‖W_QᵀW_K‖₂, which bounds the part of MLA that is not rotated.
        """
        unknown = torch.tensor(math.nan, dtype=torch.float64)
        query, key = self.plan.query, self.plan.key
        is_normed = query.gain is not None or key.gain is not None
        note = ""
        if any(side.gain is None and side.input is None for side in (query, key)):
            note = "no norm found before the projections: weights alone give no logit bound"
        if query.rope is not None and key.rope is not None:
            if is_normed:
                return unknown, unknown, "q/k norm on MLA: no bound is computed"
            radii = self._radius(query.input) * self._radius(key.input)
            rotated = self._projected(query.rope, query.input)
            rotated = rotated * self._projected(key.rope, key.rope_input)
            return radii * interaction + rotated, unknown, note
        # Rotations keep lengths, so the product of the largest lengths bounds the logit at any offset.
        q, k = (
            self._projected(side.weight, side.input)
            if side.gain is None
            else self._normed(side.gain, len(side.weight.starts))
            for side in (query, key)
        )
        return (unknown, q * k, note) if is_normed else (q * k, unknown, note)

    def _projected(self, weight_slice: Slice, gain: str | None) -> Tensor:
        """Returns ‖W_h‖₂ ρ + ‖b_h‖ for each query head, which no rotation changes."""
        length = self.spectral[weight_slice] * self._radius(gain)
        bias = None if weight_slice.bias is None else self.load(weight_slice.bias)
        if bias is None:
            return length
        norms = [
            bias[start : start + weight_slice.rows].double().norm()
            for start in weight_slice.starts
        ]
        return length + self._per_query_head(torch.stack(norms))

    def _per_query_head(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.plan.n_heads // len(values))

    def _normed(self, name: str, heads: int) -> Tensor:
        """Returns the largest L2 norm of a normed head, for each query head."""
        gain, bias = self._gain(name)
        width, rows = self.plan.head_dim, 1
        if gain.numel() == heads * width and heads > 1:
            rows = heads
            # A norm over all heads, or a bare parameter, which does not say; a module's [heads, d] is one per head.
            if gain.ndim == 1 or not name.endswith((".weight", ".scale")):
                width = gain.numel()
        per_head = bias.view(rows if bias.numel() == gain.numel() else 1, -1)
        lengths = width**0.5 * gain.view(rows, -1).abs().amax(1) + per_head.norm(dim=1)
        return self._per_query_head(lengths)

    def _radius(self, name: str | None) -> float:
        """Returns ρ for the named norm, or NaN if there is no such norm."""
        if name is None:
            return math.nan
        gain, bias = self._gain(name)
        return gain.numel() ** 0.5 * float(gain.abs().amax()) + float(bias.norm())

    def _gain(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns a norm's gain and bias."""
        gain = self.load(name)
        # The plan names only what is there.
        assert gain is not None, name
        is_module = name.endswith((".weight", ".scale"))
        bias = self.load(
            f"{name.rpartition('.')[0]}.bias" if is_module else f"{name}_bias"
        )
        bias = torch.zeros(1) if bias is None else bias
        return gain.double() + self.offset, bias.double()
