"""Per-head numbers of one attention layer of a checkpoint, from Gram matrices of its weights, and the logits that they
allow.

The input of a projection is g∘n + c with ‖n‖ ≤ √width (RMSNorm, LayerNorm), so its L2 norm is at most ρ = √width ·
max|g| + ‖c‖, and ‖W x + b‖ ≤ ‖W‖₂ ρ + ‖b‖. A normed head has an L2 norm of at most √d · max|g| + ‖c‖ (a flat norm
over all heads: √(heads · d) · max|g_h|). Rotation preserves L2 norms, so |q·k| ≤ ‖q‖ ‖k‖ holds at every offset. Where
several streams of tokens attend to each other, any query may meet any key: the bound takes the largest of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from qkeel.audit.attention_weights import SitePlan, Slice, StreamWeights
from qkeel.audit.checkpoint_config import VERIFIED, Geometry
from qkeel.functional.bounds import gram_interaction_norms, gram_spectral_norm

Load = Callable[[str], Tensor | None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One attention layer of a checkpoint, with one value per query head (a key head's value is repeated for its query
    heads).

    query_*, key_*: norms of W_Q and W_K [head_dim, inputs] (MLA: the up-projections, without the rope part; several
    streams of tokens: the largest).
    interaction_*: norms of W_Qᵀ W_K. logit_bound: no logit can exceed it at any position, given the norm before the
    projections; NaN if there is no such norm or if q or k are normed. interaction_bound: a tighter bound that holds if
    q and k are not rotated relative to each other (without RoPE, or for a token attending to itself); for MLA and
    several streams it equals logit_bound. gain_bound: a bound from the gains of the q/k norm; NaN if there is no such
    norm. outlier: see `outliers`. Logits are in nats, before any cap, without position biases or additive masks.
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
    interaction_bound: tuple[float, ...]
    logit_bound: tuple[float, ...]
    gain_bound: tuple[float, ...]
    query_gain_max: float | None = (
        None  #: largest magnitude of the gain of q's norm; None if there is none
    )
    key_gain_max: float | None = (
        None  #: largest magnitude of the gain of k's norm; None if there is none
    )
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
    wide = torch.float64 if weight.dtype.itemsize >= 4 else torch.float32
    products = torch.empty(
        len(weight_slice.starts), weight_slice.rows, weight_slice.rows, dtype=wide
    )
    for product, start in zip(products, weight_slice.starts):
        end = start + weight_slice.rows
        rows = (
            weight[start:end] if weight_slice.axis == 0 else weight[:, start:end].mT
        ).to(wide)
        torch.mm(rows, rows.mT, out=product)
    return products


def measure(
    plan: SitePlan, gram: Mapping[Slice, Tensor], load: Load, geometry: Geometry
) -> SiteReport:
    """Returns the report of a site from its Gram matrices; `load` reads a small tensor (gain, bias) by name."""
    heads = plan.n_heads
    norms = {name: [] for name in ("query", "key")}
    finite = torch.ones(heads, dtype=torch.bool)
    for name, sides in (("query", plan.queries), ("key", plan.keys)):
        for side in sides:
            products = _per_query_head(gram[side.weight], heads)
            is_finite = products.isfinite().all(-1).all(-1)
            finite &= is_finite
            norms[name].append(
                torch.where(is_finite[:, None, None], products, 0).double()
            )
    pairs = [gram_interaction_norms(q, k) for q in norms["query"] for k in norms["key"]]
    frobenius = torch.stack([pair[0] for pair in pairs]).amax(0)
    spectral = torch.stack([pair[1] for pair in pairs]).amax(0)
    bounds = _Bounds(plan, gram, load, geometry)
    logit_bound, gain_bound, interaction_bound = bounds.all(spectral)
    scale = geometry.scale_of(plan.head_dim)
    rotated = scale * geometry.rope_factor**2  # YaRN scales cos and sin of both sides

    def per_head(column: Tensor) -> tuple[float, ...]:
        return tuple(torch.where(finite, column.expand(heads), math.nan).tolist())

    def largest(name: str, norm: Callable[[Tensor], Tensor]) -> tuple[float, ...]:
        return per_head(
            torch.stack([norm(products) for products in norms[name]]).amax(0)
        )

    return SiteReport(
        name=plan.name,
        layout=plan.layout,
        n_heads=heads,
        n_kv_heads=plan.n_kv_heads,
        head_dim=plan.head_dim,
        scale=scale,
        query_frobenius=largest("query", _trace_root),
        query_spectral=largest("query", gram_spectral_norm),
        key_frobenius=largest("key", _trace_root),
        key_spectral=largest("key", gram_spectral_norm),
        interaction_frobenius=per_head(frobenius),
        interaction_spectral=per_head(spectral),
        interaction_bound=per_head(rotated * interaction_bound),
        logit_bound=per_head(rotated * logit_bound),
        gain_bound=per_head(rotated * gain_bound),
        query_gain_max=bounds.gain_max(plan.queries),
        key_gain_max=bounds.gain_max(plan.keys),
        notes=(
            *plan.notes,
            *bounds.notes(),
            *(() if finite.all() else ("some weights are NaN or infinite",)),
        ),
        assumed=(*plan.assumed, *bounds.assumed()),
    )


def _trace_root(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()


def _per_query_head(values: Tensor, heads: int) -> Tensor:
    """Repeats the values of key heads for their query heads."""
    return values.repeat_interleave(heads // len(values), 0)


@final
class _Bounds:
    """Bounds on |q·k| for each query head, before the scale."""

    def __init__(
        self,
        plan: SitePlan,
        gram: Mapping[Slice, Tensor],
        load: Load,
        geometry: Geometry,
    ) -> None:
        self.plan, self.gram, self.load, self.geometry = plan, gram, load, geometry
        sides = (*plan.queries, *plan.keys)
        self.is_normed = any(side.gain is not None for side in sides)
        self.is_mla = any(side.rope is not None for side in sides)

    def all(self, interaction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the bound from weights, the bound from gains, and the bound without rotation, from ‖W_QᵀW_K‖₂."""
        query, key = self.plan.queries[0], self.plan.keys[0]
        unknown = torch.tensor(math.nan, dtype=torch.float64)
        if self.is_mla and self.is_normed:
            return unknown, unknown, unknown
        radii = self._radius(query.input) * self._radius(key.input)
        if query.rope is not None and key.rope is not None:
            bound = radii * interaction + self._rotated(
                query.rope, query.input
            ) * self._rotated(key.rope, key.rope_input)
            return bound, unknown, bound
        q, k = (self._longest(sides) for sides in (self.plan.queries, self.plan.keys))
        if self.is_normed:
            return unknown, q * k, unknown
        if len(self.plan.queries) > 1:
            return q * k, unknown, q * k
        # Biases add to both sides what they add to the product of the norms.
        without = self._spectral(query.weight) * self._spectral(key.weight) * radii
        return q * k, unknown, radii * interaction + (q * k - without)

    def _longest(self, sides: tuple[StreamWeights, ...]) -> Tensor:
        """Returns the largest L2 norm of a head's q (or k) over all streams of tokens; NaN if one has no bound."""
        reaches = []
        for side in sides:
            if side.gain is not None:
                reaches.append(self._normed(side.gain, len(side.weight.starts)))
            else:
                reaches.append(self._rotated(side.weight, side.input))
        return torch.stack(
            [_per_query_head(reach, self.plan.n_heads) for reach in reaches]
        ).amax(0)

    def _spectral(self, weight_slice: Slice) -> Tensor:
        products = self.gram[weight_slice]
        is_finite = products.isfinite().all(-1).all(-1)[:, None, None]
        return _per_query_head(
            gram_spectral_norm(torch.where(is_finite, products, 0)).double(),
            self.plan.n_heads,
        )

    def _rotated(self, weight_slice: Slice, gain: str | None) -> Tensor:
        """Returns ‖W_h‖₂ ρ + ‖b_h‖ for each query head, which no rotation changes."""
        reach = self._spectral(weight_slice) * self._radius(gain)
        if weight_slice.bias is None:
            return reach
        bias = self._vector(weight_slice.bias)
        norms = torch.stack(
            [
                bias[start : start + weight_slice.rows].norm()
                for start in weight_slice.starts
            ]
        )
        return reach + _per_query_head(norms, self.plan.n_heads)

    def _normed(self, name: str, heads: int) -> Tensor:
        """Returns the largest L2 norm of a normed head, for each head."""
        gain, offset, size = self._gain(name), self._offset(name), self.plan.head_dim
        if gain.numel() == heads * size and heads > 1:
            # A norm over all heads, or a bare parameter, which does not say; a module's [heads, d] is one per head.
            is_flat = gain.ndim == 1 or not name.endswith((".weight", ".scale"))
            width = gain.numel() if is_flat else size
            added = (
                offset.view(heads, -1).norm(dim=1)
                if offset.numel() == gain.numel()
                else offset.norm()
            )
            return width**0.5 * gain.view(heads, -1).abs().amax(1) + added
        return (size**0.5 * gain.abs().amax() + offset.norm()).expand(heads)

    def _radius(self, name: str | None) -> float:
        """Returns ρ for the named norm, or NaN if there is no such norm."""
        if name is None:
            return math.nan
        gain = self._gain(name)
        return gain.numel() ** 0.5 * float(gain.abs().amax()) + float(
            self._offset(name).norm()
        )

    def gain_max(self, sides: tuple[StreamWeights, ...]) -> float | None:
        """Returns max|g| over the streams, or None if there is no gain."""
        largest = [
            float(self._gain(side.gain).abs().amax())
            for side in sides
            if side.gain is not None
        ]
        return max(largest) if largest else None

    def _gain(self, name: str) -> Tensor:
        return self._vector(name) + (1.0 if self.geometry.one_plus else 0.0)

    def _vector(self, name: str) -> Tensor:
        vector = self.load(name)
        assert vector is not None, name  # the plan names only what is there
        return vector.double()

    def _offset(self, gain: str) -> Tensor:
        is_module = gain.endswith((".weight", ".scale"))
        bias = self.load(
            gain.rpartition(".")[0] + ".bias" if is_module else f"{gain}_bias"
        )
        return torch.zeros((), dtype=torch.float64) if bias is None else bias.double()

    def assumed(self) -> list[str]:
        """Returns the conventions that the bounds rest on."""
        kind = self.geometry.model_type
        sides = (*self.plan.queries, *self.plan.keys)
        if kind in VERIFIED or not any(side.input or side.gain for side in sides):
            return []
        if kind is None:
            return [
                "no model_type: norms taken to precede attention, gains read as w, logits divided by √head_dim"
            ]
        return [
            f"the bounds of the model type {kind} have not been compared with the logits of its code"
        ]

    def notes(self) -> list[str]:
        """Returns the reasons for missing bounds."""
        notes = []
        has_norms = True
        for side in (*self.plan.queries, *self.plan.keys):
            has_norms = has_norms and (side.gain is not None or side.input is not None)
        if self.is_mla and self.is_normed:
            notes.append("q/k norm on MLA: no bound is computed")
        elif not self.plan.notes and not has_norms:
            notes.append(
                "no norm found before the projections: weights alone give no logit bound"
            )
        return notes
