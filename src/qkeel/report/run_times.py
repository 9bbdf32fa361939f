"""The times at which the files of runs were written, which those of a copied directory may be of the copy."""

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
    """Returns when the first and the last file of the runs was written, and the time between; {} of none."""
    files = [file for run in runs for name in ("config.json", "metrics.jsonl") if (file := run / name).exists()]
    if not files:
        return {}
    times = [file.stat().st_mtime for file in files]
    said = [time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (min(times), max(times))]
    if said[0] == said[1]:
        return {"Files written": said[0]}
    return {"Files written": f"{said[0]} to {said[1]}, in {duration(max(times) - min(times))}"}
