"""Scans a checkpoint head by head without running the model."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from qkeel.audit.attention_weights import (
    FUSED,
    SEPARATE,
    SitePlan,
    Slice,
    Unknown,
    missing_layers,
    recognise,
)
from qkeel.audit.checkpoint_config import Geometry, read_geometry
from qkeel.audit.logit_bounds import SiteReport, grams, measure
from qkeel.errors import InvalidValueError, UnknownNameError
from qkeel.metrics import text_table
from qkeel.safetensors_io import Checkpoint, StoredTensor, TensorReader, open_checkpoint

_CHUNK = 1 << 19  # numbers converted at once: small enough for a core's cache
Z_SCORE = 3.5  # Iglewicz & Hoaglin 1993, "How to detect and handle outliers": modified z-score above 3.5
RATIO = 2.0  # an outlier also exceeds this multiple of the median, so that a tight checkpoint has none


def outliers(sites: Sequence[SiteReport]) -> list[tuple[bool, ...]]:
    """Marks the heads of each site whose ‖W_Qᵀ W_K‖₂ · scale is far above the median of all heads, on a logarithmic
    scale.

    z = 0.6745 (ln x - median ln x) / median |ln x - median|; an outlier has z > 3.5 and x > 2 · median, or is NaN.
    """
    logs = [[_log(x * site.scale) for x in site.interaction_spectral] for site in sites]
    finite = [x for row in logs for x in row if math.isfinite(x)]
    if not finite:
        return [tuple(math.isnan(x) for x in row) for row in logs]
    middle = statistics.median(finite)
    spread = max(statistics.median(abs(x - middle) for x in finite), 1e-12)
    high = middle + max(Z_SCORE * spread / 0.6745, math.log(RATIO))
    return [tuple(math.isnan(x) or x > high for x in row) for row in logs]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan


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
    heads: bool = True,
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
    flags = flags or Geometry()
    for name, value in (
        ("n_heads", flags.n_heads),
        ("n_kv_heads", flags.n_kv_heads),
        ("head_dim", flags.head_dim),
    ):
        if value is not None and value < 1:
            raise InvalidValueError(
                f"expected {name} to be at least 1, got {value}; give the model's actual number"
            )
    checkpoint = open_checkpoint(path)
    sites: list[SitePlan | Unknown] = []
    if heads:
        sites = recognise(
            checkpoint.tensors,
            lambda name: read_geometry(checkpoint.config, name, flags),
        )
        if not sites:
            raise _nothing_known(checkpoint)
    plans = [site for site in sites if isinstance(site, SitePlan)]
    unknown = [site for site in sites if isinstance(site, Unknown)]
    tensors, measured = _measured(checkpoint, plans, flags, on_progress)
    reports = [measured[plan.name] for plan in plans]
    marked = [
        dataclasses.replace(site, outlier=marks)
        for site, marks in zip(reports, outliers(reports))
    ]
    return Scan(
        path=str(path),
        n_bytes=checkpoint.size,
        sites=tuple(marked),
        unknown=(*unknown, *missing_layers(checkpoint, sites)),
        tensors=tuple(tensors),
    )


def _nothing_known(checkpoint: Checkpoint) -> UnknownNameError:
    matrices = [name for name, t in checkpoint.tensors.items() if len(t.shape) > 1][:6]
    known = ", ".join([f"{q}/{k}" for q, k in SEPARATE] + sorted(FUSED))
    return UnknownNameError(
        f"{checkpoint.path} holds no attention weights under a known name; expected one of {known}; "
        f"found {', '.join(matrices) or 'no matrices'}, … Rename them, or list the tensors alone with --tensors-only"
    )


def _measured(
    checkpoint: Checkpoint,
    plans: Sequence[SitePlan],
    flags: Geometry,
    on_progress: ScanProgress,
) -> tuple[list[TensorReport], dict[str, SiteReport]]:
    """Reads every tensor once, in the order of the files, and measures a site when its last weight has been read."""
    reader, small = TensorReader(), TensorReader()
    waiting: dict[str, list[SitePlan]] = {}
    for plan in plans:
        for name in {part.tensor for part in plan.slices()}:
            waiting.setdefault(name, []).append(plan)

    def load(name: str) -> Tensor | None:
        return (
            small.read(checkpoint.tensors[name]).clone()
            if name in checkpoint.tensors
            else None
        )

    gram: dict[Slice, Tensor] = {}
    sites: dict[str, SiteReport] = {}
    reports = []
    done, total = (
        0,
        sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
    )
    for tensor in checkpoint.tensors.values():
        norm, non_finite = _norm(reader, tensor) if tensor.floating else (None, 0)
        report = TensorReport(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            frobenius=norm,
            non_finite=non_finite,
        )
        reports.append(report)
        for plan in waiting.get(tensor.name, ()):
            weight = reader.read(tensor)
            parts = set(plan.slices())
            gram |= {
                part: grams(weight, part)
                for part in parts
                if part.tensor == tensor.name and part not in gram
            }
            if all(part in gram for part in parts):
                products = {part: gram.pop(part) for part in parts}
                geometry = read_geometry(
                    checkpoint.config, plan.queries[0].weight.tensor, flags
                )
                sites[plan.name] = measure(plan, products, load, geometry)
        done += math.prod(tensor.shape)
        on_progress(round(checkpoint.size * done / max(total, 1)), checkpoint.size)
    return reports, sites


def _norm(reader: TensorReader, tensor: StoredTensor) -> tuple[float, int]:
    """Returns the Frobenius norm of the finite values, and the number of other values."""
    total, non_finite = 0.0, 0
    for part in reader.parts(tensor):
        for values in part.split(_CHUNK):
            wide = values if values.dtype.itemsize >= 4 else values.float()
            square = float(wide.dot(wide))
            if not math.isfinite(square):  # NaN, infinity, or a square beyond float32
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
        parts.append(
            "bounds: no logit can be larger, for any input (nats); unrotated: without RoPE; -: not known"
        )
    parts += [line for line in (_outlier_line(scan), *_notes(scan)) if line]
    bad = [t for t in scan.tensors if t.non_finite]
    parts += [
        f"not finite: {t.name} has {t.non_finite:,} NaN or infinite values" for t in bad
    ]
    parts += [f"unknown: {u.name}: {u.reason}" for u in scan.unknown]
    if tensors:
        head = ("tensor", "dtype", "shape", "|W|_F")
        body = [
            (t.name, t.dtype, "x".join(map(str, t.shape)) or "-", _number(t.frobenius))
            for t in scan.tensors
        ]
        parts.append(text_table([head, *body]))
    return "\n".join(parts)


def _rows(site: SiteReport, every_head: bool) -> list[tuple[str, ...]]:
    values = dataclasses.asdict(site)
    sizes = site.bounds()
    if not any(map(math.isfinite, sizes)):
        sizes = list(site.interaction_spectral)
    sizes = [
        math.inf if math.isnan(size) else size for size in sizes
    ]  # a head that is not finite comes first
    heads = (
        range(site.n_heads)
        if every_head
        else [max(range(site.n_heads), key=sizes.__getitem__)]
    )
    return [
        (
            site.name,
            f"{h}{' !' if site.outlier[h] else ''}",
            *(_number(values[name][h]) for name in _COLUMNS),
        )
        for h in heads
    ]


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.4g}"


def _outlier_line(scan: Scan) -> str:
    heads = [
        f"{site.name} head {h}"
        for site in scan.sites
        for h, out in enumerate(site.outlier)
        if out
    ]
    if not heads:
        return ""
    others = f" and {len(heads) - 8} more" if len(heads) > 8 else ""
    return f"outlier heads (marked !): {', '.join(heads[:8])}{others}: |Wq'Wk|_2 far above the median of all heads"


def _notes(scan: Scan) -> list[str]:
    """Returns each note once, with its layers."""
    where: dict[str, list[str]] = {}
    for site in scan.sites:
        for note in (*site.notes, *site.assumed):
            where.setdefault(note, []).append(site.name)
    total = len(scan.sites)
    return [
        f"note ({'all layers' if len(names) == total else ', '.join(names[:3])}): {n}"
        for n, names in where.items()
    ]
