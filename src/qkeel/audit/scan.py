"""Scans a checkpoint head by head without running the model."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from qkeel.audit.checkpoint_config import Geometry, read_geometry
from qkeel.audit.checkpoint_heads import (
    FUSED,
    SEPARATE,
    SitePlan,
    Slice,
    Unknown,
    missing_layers,
    recognise,
)
from qkeel.audit.logit_bounds import SiteReport, grams, measure
from qkeel.errors import InvalidValueError, UnknownNameError
from qkeel.metrics import text_table
from qkeel.safetensors_io import Checkpoint, StoredTensor, TensorReader, open_checkpoint

# Numbers converted at once: small enough for a core's cache.
_CHUNK = 1 << 19
# Iglewicz & Hoaglin 1993, "How to detect and handle outliers": modified z-score above
# 3.5.
Z_SCORE = 3.5
# An outlier also exceeds this multiple of the median, so that a tight checkpoint has
# none.
RATIO = 2.0


def outliers(sites: Sequence[SiteReport]) -> list[tuple[bool, ...]]:
    """Marks the heads of each site whose ‖W_Qᵀ W_K‖₂ · scale is far above the median of all heads, on a logarithmic
    scale.

    z = 0.6745 (ln x - median ln x) / median |ln x - median|; an outlier has z > 3.5 and x > 2 · median, or is NaN.
    """
    logs = [
        [
            math.log(x * site.scale) if x > 0 else -math.inf if x == 0 else math.nan
            for x in site.interaction_spectral
        ]
        for site in sites
    ]
    finite = [x for row in logs for x in row if math.isfinite(x)]
    high = math.inf
    if finite:
        middle = statistics.median(finite)
        # Heads that are all alike have no spread; RATIO alone decides then.
        spread = max(statistics.median(abs(x - middle) for x in finite), 1e-12)
        high = middle + max(Z_SCORE * spread / 0.6745, math.log(RATIO))
    return [tuple(math.isnan(x) or x > high for x in row) for row in logs]


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
    path: str | Path,
    *,
    flags: Geometry | None = None,
    on_progress: ScanProgress = _silent,
) -> Scan:
    """Measures every tensor and, per layer and head, W_Q, W_K and W_Qᵀ W_K, and bounds the logits that they allow.

    Memory use is limited to one head and the Gram matrices of a few layers; file pages are released during the scan.

    Args:
        path: a .safetensors file, a folder of shards with model.safetensors.index.json, or a Hugging Face folder.
        flags: head counts that complete or override those of config.json.
        on_progress: called with the number of bytes done and the total number.

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
    flags = flags or Geometry()
    for name in ("n_heads", "n_kv_heads", "head_dim"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise InvalidValueError(
                f"expected {name} to be at least 1, got {value}; give the model's actual number"
            )
    checkpoint = open_checkpoint(path)

    def geometry(name: str) -> Geometry:
        return read_geometry(checkpoint.config, name, flags)

    plans = recognise(checkpoint.tensors, geometry)
    if not plans:
        raise _nothing_known(checkpoint)
    # Every tensor is read once, in the order of the files, and a site measured when its last weight has been read.
    reader, small = TensorReader(), TensorReader()

    def load(name: str) -> Tensor | None:
        stored = checkpoint.tensors.get(name)
        # A few numbers are copied, as a view would keep the map of its file in memory.
        return None if stored is None else small.read(stored).clone()

    reports: dict[str, SiteReport] = {}
    waiting: dict[str, list[SitePlan]] = {}
    for plan in plans:
        if isinstance(plan, SitePlan):
            for name in {weight_slice.tensor for weight_slice in plan.slices()}:
                waiting.setdefault(name, []).append(plan)
    gram: dict[Slice, Tensor] = {}
    tensors = []
    n_read, n_values = 0, sum(math.prod(t.shape) for t in checkpoint.tensors.values())
    for tensor in checkpoint.tensors.values():
        norm, non_finite = _norm(reader, tensor) if tensor.floating else (None, 0)
        tensors.append(
            TensorReport(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                frobenius=norm,
                non_finite=non_finite,
            )
        )
        for plan in waiting.get(tensor.name, ()):
            parts = plan.slices()
            weight = reader.read(tensor)
            for weight_slice in parts:
                if weight_slice.tensor == tensor.name and weight_slice not in gram:
                    # Gram matrices of a few layers are kept instead of their weights: head_dim² numbers a head.
                    gram[weight_slice] = grams(weight, weight_slice)
            if all(weight_slice in gram for weight_slice in parts):
                products = {
                    weight_slice: gram.pop(weight_slice) for weight_slice in set(parts)
                }
                sizes = geometry(plan.query.weight.tensor)
                reports[plan.name] = measure(plan, products, load, sizes)
        n_read += math.prod(tensor.shape)
        on_progress(round(checkpoint.size * n_read / max(n_values, 1)), checkpoint.size)
    sites = [reports[plan.name] for plan in plans if isinstance(plan, SitePlan)]
    unknown = [plan for plan in plans if isinstance(plan, Unknown)]
    return Scan(
        path=str(path),
        n_bytes=checkpoint.size,
        sites=tuple(
            dataclasses.replace(site, outlier=marks)
            for site, marks in zip(sites, outliers(sites))
        ),
        unknown=(*unknown, *missing_layers(checkpoint, plans)),
        tensors=tuple(tensors),
    )


def _nothing_known(checkpoint: Checkpoint) -> UnknownNameError:
    matrices = [name for name, t in checkpoint.tensors.items() if len(t.shape) > 1][:6]
    conventions = ", ".join([f"{q}/{k}" for q, k in SEPARATE] + sorted(FUSED))
    return UnknownNameError(
        f"{checkpoint.path} holds no attention weights under a known name; expected one of {conventions}; "
        f"found {', '.join(matrices) or 'no matrices'}, … Give its queries and keys one of these names"
    )


def _norm(reader: TensorReader, tensor: StoredTensor) -> tuple[float, int]:
    """Returns the Frobenius norm of the finite values, and the number of other values."""
    total, non_finite = 0.0, 0
    # One buffer for all chunks: to allocate costs more than to convert.
    buffer = torch.empty(_CHUNK)
    for weight_slice in reader.parts(tensor):
        for values in weight_slice.split(_CHUNK):
            # `dot` adds up in the dtype of its operands, which in 16 bits is too coarse.
            is_wide = values.dtype.itemsize >= 4
            wide = values if is_wide else buffer[: len(values)].copy_(values)
            square = float(wide.dot(wide))
            # Counting is slow, so it is done only where the sum says that something is wrong.
            # NaN, infinity, or a square beyond float32.
            if not math.isfinite(square):
                exact = values.double()
                finite = exact.isfinite()
                non_finite += int((~finite).sum())
                square = float(torch.where(finite, exact, 0.0).norm()) ** 2
            total += square
    return math.sqrt(total), non_finite


# A scan as text and as JSON.

# Field of SiteReport -> heading of its column.
_COLUMNS = {
    "query_frobenius": "|Wq|_F",
    "query_spectral": "|Wq|_2",
    "key_frobenius": "|Wk|_F",
    "key_spectral": "|Wk|_2",
    "interaction_frobenius": "|Wq'Wk|_F",
    "interaction_spectral": "|Wq'Wk|_2",
    "logit_bound": "logit bound",
    "gain_bound": "gain bound",
}


def as_json(scan: Scan) -> dict[str, Any]:
    """Returns a scan as JSON-compatible values, with None for NaN and infinity.

    Example:
        >>> as_json(Scan(path="m", n_bytes=0, sites=(), unknown=(), tensors=()))["path"]
        'm'
    """
    return cast("dict[str, Any]", _plain(dataclasses.asdict(scan)))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(scan: Scan, *, every_head: bool = False) -> str:
    """Formats a scan: the head with the largest bound in each layer, or every head; then outliers, unknown attention
    and non-finite tensors.

    Example:
        >>> print(table(Scan(path="m", n_bytes=0, sites=(), unknown=(), tensors=())))
        m: 0.000 GB, 0 tensors, 0 attention layers
    """
    size = f"{scan.n_bytes / 1e9:,.3f} GB, {len(scan.tensors)} tensors"
    plural = "s" * (len(scan.sites) != 1)
    parts = [f"{scan.path}: {size}, {len(scan.sites)} attention layer{plural}"]
    if scan.sites:
        rows = [("layer", "head", *_COLUMNS.values())]
        for site in scan.sites:
            heads = range(site.n_heads) if every_head else [_largest_head(site)]
            for head in heads:
                mark = " !" if site.outlier[head] else ""
                values = [getattr(site, name)[head] for name in _COLUMNS]
                rows.append((site.name, f"{head}{mark}", *map(_number, values)))
        parts.append(text_table(rows))
        parts.append(
            "bounds: no logit can be larger, for any input (nats); unrotated: without RoPE; -: not known"
        )
    if names := outlier_heads(scan):
        left_out = f" and {len(names) - 8} more" if len(names) > 8 else ""
        parts.append(
            f"outlier heads (marked !): {', '.join(names[:8])}{left_out}: |Wq'Wk|_2 far above the median of all heads"
        )
    layers: dict[str, list[str]] = {}
    for site in scan.sites:
        for note in (*site.notes, *site.assumed):
            layers.setdefault(note, []).append(site.name)
    for note, names in layers.items():
        is_everywhere = len(names) == len(scan.sites)
        layer_names = "all layers" if is_everywhere else ", ".join(names[:3])
        parts.append(f"note ({layer_names}): {note}")
    parts += [
        f"not finite: {t.name} has {t.non_finite:,} NaN or infinite values"
        for t in scan.tensors
        if t.non_finite
    ]
    parts += [f"unknown: {u.name}: {u.reason}" for u in scan.unknown]
    return "\n".join(parts)


def _largest_head(site: SiteReport) -> int:
    """Returns the head with the largest bound, or norm where there is no bound; one that is not finite comes first."""
    sizes = site.bounds()
    if not any(map(math.isfinite, sizes)):
        # Without a bound, the weights' own size orders the heads.
        sizes = site.interaction_spectral
    sizes = [math.inf if math.isnan(size) else size for size in sizes]
    return sizes.index(max(sizes))


def outlier_heads(scan: Scan) -> list[str]:
    """Returns the heads that are marked as outliers, by name."""
    return [
        f"{site.name} head {head}"
        for site in scan.sites
        for head, is_outlier in enumerate(site.outlier)
        if is_outlier
    ]


def _number(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else "-"
