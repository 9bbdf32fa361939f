"""Means over the passes of a step."""

from __future__ import annotations

from typing import final

from torch import Tensor

Key = tuple[str, str]  # the site, "" for the whole model, and the name of the number


@final
class Means:
    """Adds up scalars on their device and gives their means."""

    def __init__(self) -> None:
        self._sums: dict[Key, tuple[Tensor, int]] = {}
        self._before: dict[Key, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """A pass begins, whose values `drop` takes back."""
        self._before = dict(self._sums)

    def drop(self) -> None:
        """The pass failed."""
        self._sums = self._before

    def add(self, key: Key, value: Tensor) -> None:
        """One more value."""
        total, n = self._sums.get(key, (None, 0))
        self._sums[key] = value if total is None else total + value, n + 1

    def read(self) -> dict[Key, Tensor]:
        """The means since the last read, once."""
        sums, self._sums = self._sums, {}
        return {key: total / n for key, (total, n) in sums.items()}
