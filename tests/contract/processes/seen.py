"""What one process of a run has recorded, as it is handed to the test."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Seen:
    """What one process has recorded."""

    layers: tuple[str, ...]
    steps: list[int]
    heads: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    reads: dict[str, dict[str, np.ndarray]]
    warned: list[str]
    losses: list[float]
    collectives: list[int]
    table: str
