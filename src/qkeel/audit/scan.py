"""Scans a checkpoint head by head without running the model."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from qkeel.audit.tensor_heads import (
    FUSED,
    SEPARATE,
    VERIFIED,
    Geometry,
    SitePlan,
    Slice,
    Unknown,
    missing_layers,
    read_geometry,
    recognise,
)
from qkeel.errors import InvalidValueError, UnknownNameError
from qkeel.functional.bounds import gram_interaction_norms, gram_spectral_norm
from qkeel.metrics import text_table
from qkeel.safetensors_io import Checkpoint, MappedFile, StoredTensor, open_checkpoint

# Per-head numbers of one attention layer from d×d Gram matrices of its weights, and the logits that they allow.

Load = Callable[[str], Tensor | None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One attention layer of a checkpoint, with one value per query head (a key head's value is repeated for its query
    heads).

    query_*, key_*: norms of W_Q and W_K [head_dim, inputs] (MLA: the up-projections, without the rope part).
    interaction_*: norms of W_Qᵀ W_K. logit_bound: no logit can exceed it at any position, given the norm before the
    projections; NaN if there is no such norm or if q or k are normed. interaction_bound: a tighter bound that holds if
    q and k are not rotated relative to each other (without RoPE, or for a token attending to itself); for MLA it equals
    logit_bound. gain_bound: a bound from the gains of the q/k norm; NaN if there is no such norm. outlier: see
    `outliers`. Logits are in nats, before any cap, without position biases or additive masks.
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
    query_gain_max: float | None = None  #: largest magnitude of the gain of q's norm; None if there is none
    key_gain_max: float | None = None  #: largest magnitude of the gain of k's norm; None if there is none
    outlier: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()  #: gaps of the bounds, with their reasons
    assumed: tuple[str, ...] = ()  #: conventions that the bounds rest on, and that nothing in the checkpoint confirms


def largest_bounds(site: SiteReport) -> list[float]:
    """Returns the bound on the logits of each head, from gains if q and k are normed; NaN if there is none."""
    return [gain if math.isfinite(gain) else bound for gain, bound in zip(site.gain_bound, site.logit_bound)]


def grams(weight: Tensor, part: Slice) -> Tensor:
    """Returns W_h W_hᵀ per head, [heads rows rows]: float64 for 32- and 64-bit weights, else float32.

    Works on one head at a time to bound memory. A quarter of each symmetric result is copied instead of computed.
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
    """Returns the report of a site from its Gram matrices; `load` reads a small tensor (gain, bias) by name."""
    share = plan.n_heads // plan.n_kv_heads
    a = gram[plan.query]
    b = gram[plan.key].repeat_interleave(share, 0)
    wide = torch.promote_types(a.dtype, b.dtype)  # a checkpoint may store q and k with different precision
    a, b = a.to(wide), b.to(wide)
    fine = a.isfinite().all(-1).all(-1) & b.isfinite().all(-1).all(-1)
    a, b = (torch.where(fine[:, None, None], x, 0) for x in (a, b))
    frobenius, spectral = gram_interaction_norms(a, b)
    scale = geometry.scale_of(plan.head_dim)
    query, key = gram_spectral_norm(a), gram_spectral_norm(b[::share]).repeat_interleave(share, 0)
    bounds = _Bounds(plan, gram, load, geometry, query, key)
    rotated = scale * geometry.rope_factor**2  # YaRN scales cos and sin of both sides

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
        assumed=(*plan.assumed, *bounds.assumed()),
    )


def _trace_root(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()


@final
class _Bounds:
    """Bounds on the norms of queries and keys that follow from norm layers, and hence on the logits.

    The input of a projection is g∘n + c with ‖n‖ ≤ √width (RMSNorm, LayerNorm), so its L2 norm is at most ρ = √width ·
    max|g| + ‖c‖, and ‖W x + b‖ ≤ ‖W‖₂ ρ + ‖b‖. A normed head has an L2 norm of at most √d · max|g| + ‖c‖ (a flat norm
    over all heads: √(heads · d) · max|g_h|). Rotation preserves L2 norms, so |q·k| ≤ ‖q‖ ‖k‖ holds at every offset.
    """

    def __init__(
        self, plan: SitePlan, gram: Mapping[Slice, Tensor], load: Load, geometry: Geometry, query: Tensor, key: Tensor
    ) -> None:
        self.plan, self.gram, self.load, self.geometry = plan, gram, load, geometry
        self.spectral = {"query": query, "key": key}
        self.share = plan.n_heads // plan.n_kv_heads

    def from_weights(self, interaction: Tensor) -> Tensor:
        """Bounds |q·k| by ‖q‖ ‖k‖; for MLA by ρ_q ρ_k ‖W_uqᵀ W_uk‖₂ plus the product of the norms of the rope parts."""
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
        """Bounds |q·k| without rotation by ρ_q ρ_k ‖W_Qᵀ W_K‖₂ plus what the biases add."""
        plan = self.plan
        if plan.query_gain or plan.key_gain or plan.query_rope is not None:
            return self.from_weights(interaction)
        q, k = self._reach("query", plan.query), self._reach("key", plan.key)
        wq, wk = (self.spectral[s] * self.radius(i) for s, i in (("query", plan.query_input), ("key", plan.key_input)))
        return self.radius(plan.query_input) * self.radius(plan.key_input) * interaction + (q * k - wq * wk)

    def from_gains(self) -> Tensor:
        """Bounds |q·k| if q or k are normed; NaN if neither is."""
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
        """Returns ‖b_h‖ for each head of the part."""
        if part.bias is None:
            return self.spectral["query"].new_zeros(len(part.starts))
        bias = self._vector(part.bias).to(self.spectral["query"].dtype)
        return torch.stack([bias[start : start + part.rows].norm() for start in part.starts])

    def _normed(self, gain: str, heads: int) -> Tensor:
        like = self.spectral["query"]
        g = self._gain(gain).to(like.dtype)
        offset = self._offset(gain, like)
        if g.numel() == heads * self.plan.head_dim and heads > 1:
            # A norm over all heads, or a bare parameter, which does not say; a module's [heads, d] is one per head.
            flat = g.ndim == 1 or not gain.endswith(".weight")
            width = g.numel() if flat else self.plan.head_dim
            c = offset.view(heads, -1).norm(dim=1) if offset.numel() == g.numel() else offset.norm()
            return width**0.5 * g.view(heads, -1).abs().amax(1) + c
        return (self.plan.head_dim**0.5 * g.abs().amax() + offset.norm()).expand(heads)

    def radius(self, gain: str | None) -> float:
        """Returns ρ for the named norm, or NaN if there is no such norm."""
        if gain is None:
            return math.nan
        g = self._gain(gain).double()
        return g.numel() ** 0.5 * float(g.abs().amax()) + float(self._offset(gain, g).norm())

    def gain_max(self, gain: str | None) -> float | None:
        """Returns max|g|, or None if there is no gain."""
        return None if gain is None else float(self._gain(gain).abs().amax())

    def _gain(self, name: str) -> Tensor:
        return self._vector(name) + (1.0 if self.geometry.one_plus else 0.0)

    def _vector(self, name: str) -> Tensor:
        found = self.load(name)
        assert found is not None, name  # the plan names only what is there
        return found.double()

    def _offset(self, gain: str, like: Tensor) -> Tensor:
        bias = self.load(gain.removesuffix("weight") + "bias" if gain.endswith(".weight") else f"{gain}_bias")
        return like.new_zeros(()) if bias is None else bias.to(like.dtype)

    def assumed(self) -> list[str]:
        """Returns the conventions that the bounds rest on."""
        plan, kind = self.plan, self.geometry.model_type
        if kind in VERIFIED or not (plan.query_input or plan.query_gain or plan.key_gain):
            return []
        if kind is None:
            return ["no model_type: norms taken to precede attention, gains read as w, logits divided by √head_dim"]
        return [f"the bounds of the model type {kind} have not been compared with the logits of its code"]

    def notes(self) -> list[str]:
        """Returns the reasons for missing bounds."""
        plan = self.plan
        found = []
        missing = [plan.query_input, plan.key_input, *([plan.rope_input] if plan.query_rope else [])]
        if not plan.notes and not (plan.query_gain and plan.key_gain) and None in missing:
            found.append("no norm found before the projections: weights alone give no logit bound")
        if plan.query_rope is not None and (plan.query_gain or plan.key_gain):
            found.append("q/k norm on MLA: no bound is computed")
        return found


Z_SCORE = 3.5  # Iglewicz & Hoaglin 1993, "How to detect and handle outliers": modified z-score above 3.5
RATIO = 2.0  # an outlier also exceeds this multiple of the median, so that a tight checkpoint has none


def outliers(sites: Sequence[SiteReport]) -> list[tuple[bool, ...]]:
    """Marks the heads of each site whose ‖W_Qᵀ W_K‖₂ · scale is far above the median of all heads, on a logarithmic
    scale.

    z = 0.6745 (ln x - median ln x) / median |ln x - median|; an outlier has z > 3.5 and x > 2 · median, or is NaN.
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


# Reading a checkpoint in one pass over its files.

_CHUNK = 1 << 19  # numbers read at once: small enough for a core's cache
_SOLVERS = max(1, min(4, (os.cpu_count() or 1) // 2))  # eigenvalue threads
_PENDING = 2 * _SOLVERS  # attention layers queued for eigenvalues; bounds memory
_KEEP = 1 << 26  # bytes of a large tensor that stay mapped in memory

ScanProgress = Callable[[int, int], None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor of the checkpoint."""

    name: str  #: as in the checkpoint
    dtype: str  #: as in the checkpoint
    shape: tuple[int, ...]  #: as in the checkpoint
    frobenius: float | None  #: ‖·‖_F of the finite values; None if not floating-point
    non_finite: int  #: number of NaN and infinite values


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result of `scan`: attention sites, candidates that could not be read (with the reasons), and every tensor."""

    path: str  #: path of the checkpoint, as given
    n_bytes: int  #: size of the checkpoint in bytes
    sites: tuple[SiteReport, ...]  #: every attention layer that was read
    unknown: tuple[Unknown, ...]  #: what looks like attention but could not be read
    tensors: tuple[TensorReport, ...]  #: every tensor


def _silent(done: int, total: int) -> None:
    return


def scan(
    path: str | Path, *, flags: Geometry | None = None, on_progress: ScanProgress = _silent, heads: bool = True
) -> Scan:
    """Measures every tensor and, per layer and head, W_Q, W_K and W_Qᵀ W_K, and bounds the logits that they allow.

    Memory use is limited to one head and the Gram matrices of a few layers; file pages are released during the scan.

    Args:
        path: a .safetensors file, a folder of shards with model.safetensors.index.json, or a Hugging Face folder.
        flags: head counts that complete or override those of config.json.
        on_progress: called with the number of bytes done and the total number.
        heads: whether to measure heads; if False, only the tensors are measured, and a checkpoint without known
            attention is accepted.

    Raises:
        RefusedError: the checkpoint is pickled.
        DataError: a file is missing, truncated or damaged.
        UnknownNameError: no attention weights have known names.
        InvalidValueError: a head count is below 1.

    Example:
        >>> import tempfile, torch, safetensors.torch
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> safetensors.torch.save_file({f"attn.{name}_proj.weight": torch.eye(8) for name in "qk"}, file)
        >>> scan(file, flags=Geometry(n_heads=2)).sites[0].query_spectral
        (1.0, 1.0)
    """
    given = flags or Geometry()
    for name, value in (("n_heads", given.n_heads), ("n_kv_heads", given.n_kv_heads), ("head_dim", given.head_dim)):
        if value is not None and value < 1:
            raise InvalidValueError(f"expected {name} to be at least 1, got {value}; give the model's actual number")
    checkpoint = open_checkpoint(path)
    found = recognise(checkpoint.tensors, lambda name: read_geometry(checkpoint.config, name, given)) if heads else []
    if heads and not found:
        raise _nothing_known(checkpoint)
    plans = [f for f in found if isinstance(f, SitePlan)]
    tensors, measured = _TensorPass(checkpoint, plans, given, on_progress).run()
    sites = [measured[plan.name] for plan in plans]
    marked = [dataclasses.replace(site, outlier=marks) for site, marks in zip(sites, outliers(sites))]
    return Scan(
        path=str(path),
        n_bytes=checkpoint.size,
        sites=tuple(marked),
        unknown=(*(f for f in found if isinstance(f, Unknown)), *missing_layers(checkpoint, found)),
        tensors=tuple(tensors),
    )


def _nothing_known(checkpoint: Checkpoint) -> UnknownNameError:
    matrices = [name for name, t in checkpoint.tensors.items() if len(t.shape) > 1][:6]
    known = ", ".join([f"{q}/{k}" for q, k in SEPARATE] + sorted(FUSED))
    return UnknownNameError(
        f"{checkpoint.path} holds no attention weights under a known name; expected one of {known}; "
        f"found {', '.join(matrices) or 'no matrices'}, … Rename them, or list the tensors alone with --tensors-only"
    )


@final
class _TensorPass:
    """One pass over the tensors in the order of the files.

    This thread reads and computes Gram matrices; other threads compute their eigenvalues, since LAPACK solves small
    matrices one by one on a single core.
    """

    def __init__(
        self, checkpoint: Checkpoint, plans: Iterable[SitePlan], flags: Geometry, progress: ScanProgress
    ) -> None:
        self.checkpoint, self.flags, self.progress = checkpoint, flags, progress
        self.sites: dict[str, Future[SiteReport]] = {}
        self.waiting: dict[str, list[SitePlan]] = {}
        self.grams: dict[Slice, Tensor] = {}
        self.small: dict[Path, MappedFile] = {}
        self.lock = threading.Lock()
        for plan in plans:
            for tensor in {s.tensor for s in plan.slices()}:
                self.waiting.setdefault(tensor, []).append(plan)

    def run(self) -> tuple[list[TensorReport], dict[str, SiteReport]]:
        """Reads every tensor once; measures a site when its last weight has been read."""
        done, total = 0, self.checkpoint.size
        reports = []
        file: MappedFile | None = None
        with ThreadPoolExecutor(_SOLVERS, "qkeel-scan") as solvers:
            for tensor in self.checkpoint.tensors.values():
                if file is None or file.file != tensor.file:
                    file = MappedFile(tensor.file)
                reports.append(self._report(file, tensor, solvers))
                file.release(tensor.begin, tensor.end)
                done += tensor.end - tensor.begin
                self.progress(done, total)
            return reports, {name: site.result() for name, site in self.sites.items()}

    def _report(self, file: MappedFile, tensor: StoredTensor, solvers: ThreadPoolExecutor) -> TensorReport:
        file.expect(tensor.begin, tensor.end)
        plans = self.waiting.pop(tensor.name, [])
        weight = file.view(tensor) if plans else None
        for part in {s for plan in plans for s in plan.slices() if s.tensor == tensor.name}:
            assert weight is not None
            self.grams[part] = grams(weight, part)
        norm, bad = self._norm(file, tensor) if tensor.floating else (None, 0)
        for plan in plans:
            if all(part in self.grams for part in plan.slices()):
                own = {part: self.grams.pop(part) for part in plan.slices()}
                self._hand_over(plan, own, solvers)
        return TensorReport(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, frobenius=norm, non_finite=bad)

    def _hand_over(self, plan: SitePlan, own: dict[Slice, Tensor], solvers: ThreadPoolExecutor) -> None:
        geometry = read_geometry(self.checkpoint.config, plan.query.tensor, self.flags)
        self.sites[plan.name] = solvers.submit(measure, plan, own, self._load, geometry)
        if len(self.sites) > _PENDING:
            list(self.sites.values())[-1 - _PENDING].result()

    def _norm(self, file: MappedFile, tensor: StoredTensor) -> tuple[float, int]:
        """Returns the Frobenius norm of the finite values and the number of other values; reuses Gram matrices if they
        are complete."""
        known = [(part, gram) for part, gram in self.grams.items() if part.tensor == tensor.name]
        if len(known) == 1 and len(known[0][0].starts) * known[0][0].rows == tensor.shape[known[0][0].axis]:
            square = float(known[0][1].diagonal(dim1=-2, dim2=-1).double().sum())
            if math.isfinite(square):
                return math.sqrt(square), 0
        return _norm(file, tensor)

    def _load(self, name: str) -> Tensor | None:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            return None
        with self.lock:  # several solver threads call this
            if tensor.file not in self.small:
                self.small = {tensor.file: MappedFile(tensor.file)}
            return self.small[tensor.file].view(tensor).clone()


def _norm(file: MappedFile, tensor: StoredTensor) -> tuple[float, int]:
    """Returns the Frobenius norm of the finite values, and the number of other values."""
    flat = file.view(tensor).reshape(-1)
    size = flat.element_size()
    # One buffer for all chunks: allocating would cost more than converting.
    wide = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32 if size < 4 else flat.dtype)
    total, bad = 0.0, 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        values = part if size >= 4 else wide[: len(part)].copy_(part)
        square = float(values.dot(values))
        if not math.isfinite(square):  # NaN, infinity, or a square beyond float32
            exact = part.double()
            fine = exact.isfinite()
            bad += int((~fine).sum())
            square = float(torch.linalg.vector_norm(torch.where(fine, exact, 0.0))) ** 2
        total += square
        if start * size % _KEEP == 0 and start:
            file.release(tensor.begin, tensor.begin + start * size)
            file.expect(tensor.begin + start * size, tensor.end)
    return math.sqrt(total), bad


# A scan as text and as JSON.

# Field of SiteReport -> heading of its column.
_COLUMNS = {
    "query_frobenius": "|Wq|_F",
    "query_spectral": "|Wq|_2",
    "key_frobenius": "|Wk|_F",
    "key_spectral": "|Wk|_2",
    "interaction_frobenius": "|Wq'Wk|_F",
    "interaction_spectral": "|Wq'Wk|_2",
    "interaction_bound": "unrotated",
    "logit_bound": "logit bound",
    "gain_bound": "gain bound",
}


def as_json(scan: Scan) -> dict[str, Any]:
    """Returns a scan as JSON-compatible values, with None for NaN and infinity.

    Example:
        >>> as_json(Scan(path="m", n_bytes=0, sites=(), unknown=(), tensors=()))["path"]
        'm'
    """
    return {name: _plain(value) for name, value in dataclasses.asdict(scan).items()}


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def table(scan: Scan, *, every_head: bool = False, tensors: bool = False) -> str:
    """Formats a scan: the head with the largest bound in each layer, or every head; then outliers, unknown attention
    and non-finite tensors.

    Example:
        >>> print(table(Scan(path="m", n_bytes=0, sites=(), unknown=(), tensors=())))
        m: 0.000 GB, 0 tensors, 0 attention layers
    """
    size = f"{scan.n_bytes / 1e9:,.3f} GB, {len(scan.tensors)} tensors"
    parts = [f"{scan.path}: {size}, {len(scan.sites)} attention layers"]
    if scan.sites:
        rows = [row for site in scan.sites for row in _rows(site, every_head)]
        parts.append(text_table([("layer", "head", *_COLUMNS.values()), *rows]))
        parts.append("bounds: no logit can be larger, for any input (nats); unrotated: without RoPE; -: not known")
    parts += [line for line in (_outlier_line(scan), *_notes(scan)) if line]
    bad = [t for t in scan.tensors if t.non_finite]
    parts += [f"not finite: {t.name} has {t.non_finite:,} NaN or infinite values" for t in bad]
    parts += [f"unknown: {u.name}: {u.reason}" for u in scan.unknown]
    if tensors:
        head = ("tensor", "dtype", "shape", "|W|_F")
        body = [(t.name, t.dtype, "x".join(map(str, t.shape)) or "-", _number(t.frobenius)) for t in scan.tensors]
        parts.append(text_table([head, *body]))
    return "\n".join(parts)


def _rows(site: SiteReport, every_head: bool) -> list[tuple[str, ...]]:
    values = dataclasses.asdict(site)
    sizes = largest_bounds(site)
    if not any(map(math.isfinite, sizes)):
        sizes = list(site.interaction_spectral)
    sizes = [math.inf if math.isnan(size) else size for size in sizes]  # a head that is not finite comes first
    heads = range(site.n_heads) if every_head else [max(range(site.n_heads), key=sizes.__getitem__)]
    return [
        (site.name, f"{h}{' !' if site.outlier[h] else ''}", *(_number(values[name][h]) for name in _COLUMNS))
        for h in heads
    ]


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.4g}"


def _outlier_line(scan: Scan) -> str:
    found = [f"{site.name} head {h}" for site in scan.sites for h, out in enumerate(site.outlier) if out]
    if not found:
        return ""
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"outlier heads (marked !): {', '.join(found[:8])}{more}: |Wq'Wk|_2 far above the median of all heads"


def _notes(scan: Scan) -> list[str]:
    """Returns each note once, with its layers."""
    where: dict[str, list[str]] = {}
    for site in scan.sites:
        for note in (*site.notes, *site.assumed):
            where.setdefault(note, []).append(site.name)
    total = len(scan.sites)
    return [
        f"note ({'all layers' if len(names) == total else ', '.join(names[:3])}): {n}" for n, names in where.items()
    ]
