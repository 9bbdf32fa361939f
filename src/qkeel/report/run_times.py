"""The times at which runs were written, from their files; a copy of a directory may have other ones."""

from __future__ import annotations

import time
from pathlib import Path


def duration(seconds: float) -> str:
    """Returns a time span in the unit that suits it.

    >>> duration(42.3), duration(200), duration(7_200), duration(200_000)
    ('42 s', '3.3 min', '2 h', '2.3 days')
    """
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def written_times(*runs: Path) -> dict[str, str]:
    """Returns when the first of the runs was begun, the last one was written to, and the time between; {} of none."""
    begun, ended = [], []
    for run in runs:
        times = [file.stat().st_mtime for name in ("config.json", "metrics.jsonl") if (file := run / name).exists()]
        begun += times[:1]
        ended += times
    if not begun:
        return {}
    first, last = min(begun), max(ended)
    said = [time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (first, last)]
    return {"Date": f"{said[0]} to {said[1]}" if said[0] != said[1] else said[0], "Duration": duration(last - first)}
