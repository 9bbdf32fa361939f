"""Processes of this machine, through joblib."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import final

from qkeel.lab.execution.executors.executor import Unit
from qkeel.lab.execution.workers import Outcome, work_here


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Processes of this machine, through joblib; they die with the one that started them."""

    def capacity(self) -> int:
        """As many as this process has cores, at most 4, for each takes about 0.4 GB."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return min(cores, 4)

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        yield from work_here(units, workers)
