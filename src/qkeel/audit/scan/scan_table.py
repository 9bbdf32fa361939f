"""A scan as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from qkeel.audit.scan.head_bounds import SiteReport
from qkeel.audit.scan.scan import Scan

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
    """Returns a scan as plain values; NaN, which JSON does not have, is None.

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
    """Returns a scan as text: per layer its largest head, or every head, then outliers, what is unknown or not finite.

    >>> print(table(Scan(path="m", n_bytes=0, sites=(), unknown=(), tensors=())))
    m: 0.000 GB, 0 tensors, 0 attentions
    """
    parts = [f"{scan.path}: {scan.n_bytes / 1e9:,.3f} GB, {len(scan.tensors)} tensors, {len(scan.sites)} attentions"]
    if scan.sites:
        rows = [row for site in scan.sites for row in _rows(site, every_head)]
        parts.append(_align([("layer", "head", *_COLUMNS.values()), *rows]))
        parts.append("bounds: no logit can be larger, whatever the input (nats); unrotated: without RoPE; -: not known")
    parts += [line for line in (_outlier_line(scan), *_notes(scan)) if line]
    bad = [t for t in scan.tensors if t.non_finite]
    parts += [f"not finite: {t.name} has {t.non_finite:,} NaN or infinite values" for t in bad]
    parts += [f"unknown: {u.name}: {u.reason}" for u in scan.unknown]
    if tensors:
        head = ("tensor", "dtype", "shape", "|W|_F")
        body = [(t.name, t.dtype, "x".join(map(str, t.shape)) or "-", _number(t.frobenius)) for t in scan.tensors]
        parts.append(_align([head, *body]))
    return "\n".join(parts)


def _rows(site: SiteReport, every_head: bool) -> list[tuple[str, ...]]:
    sizes = [x if x == x else math.inf for x in site.interaction_spectral]
    heads = range(site.n_heads) if every_head else [max(range(site.n_heads), key=sizes.__getitem__)]
    values = dataclasses.asdict(site)
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
    """Each note once, with the layers it is about."""
    where: dict[str, list[str]] = {}
    for site in scan.sites:
        for note in site.notes:
            where.setdefault(note, []).append(site.name)
    total = len(scan.sites)
    return [
        f"note ({'all layers' if len(names) == total else ', '.join(names[:3])}): {n}" for n, names in where.items()
    ]


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
