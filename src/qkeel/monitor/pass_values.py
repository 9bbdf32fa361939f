"""Values that are collected in each pass, and kept for the step if the pass was trained."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from qkeel.monitor.gather import NumberKey, PartialValue, Reduction, SiteNumbers

K = TypeVar("K")
V = TypeVar("V")


class PassValues(abc.ABC, Generic[K, V]):
    """Values collected in each pass, and over the trained passes of a step."""

    def __init__(self) -> None:
        self._of_pass: dict[K, V] = {}
        self._of_step: dict[K, V] = {}

    def begin(self) -> None:
        """Begins a pass; the values of a pass that has not ended are dropped."""
        self._of_pass = {}

    def end(self) -> dict[K, V]:
        """Ends a pass and returns its values."""
        values, self._of_pass = self._of_pass, {}
        return values

    def keep(self, values: Mapping[K, V]) -> None:
        """Adds the values of a pass that was trained to those of the step."""
        for key, value in values.items():
            self._of_step[key] = (
                self.joined(key, self._of_step[key], value)
                if key in self._of_step
                else value
            )

    def count(self, key: K, value: V) -> None:
        """Adds a value to those of the running pass."""
        self._of_pass[key] = (
            self.joined(key, self._of_pass[key], value)
            if key in self._of_pass
            else value
        )

    @abc.abstractmethod
    def joined(self, key: K, old: V, new: V) -> V:
        """Combines two values with the same key."""

    @abc.abstractmethod
    def read(self) -> SiteNumbers:
        """Returns the numbers of the step so far, and forgets them."""

    def taken(self) -> dict[K, V]:
        """Returns the values of the step so far, and forgets them."""
        values, self._of_step = self._of_step, {}
        return values


def joined(how: Reduction, known: Tensor, new: Tensor, share: float) -> Tensor:
    """Combines two values, where `share` is the share of the data that the new value covers.

    >>> joined("root_mean", torch.tensor(1.0), torch.tensor(7.0), 0.5)
    tensor(5.)
    """
    if how == "max":
        return torch.maximum(known, new)
    if how == "root_mean":
        return torch.lerp(known.square(), new.square(), share).sqrt()
    return torch.lerp(known, new, share)


@final
class Means(PassValues[NumberKey, tuple[Tensor, int]]):
    """Collects means on their device, each over a number of values, and combines them."""

    def __init__(self) -> None:
        super().__init__()
        self._reductions: dict[NumberKey, Reduction] = {}
        self.summed: set[NumberKey] = set()  # what is summed over the passes of a step

    def add(self, of: NumberKey, mean: Tensor, n: int, how: Reduction = "mean") -> None:
        """Adds a mean over n values. how: how several means are combined."""
        self._reductions[of] = how
        self.count(of, (mean, n))

    def joined(
        self, key: NumberKey, old: tuple[Tensor, int], new: tuple[Tensor, int]
    ) -> tuple[Tensor, int]:
        (mean, n), (added, more) = old, new
        if key in self.summed:
            return mean + added, n
        return joined(
            self._reductions[key], mean, added, more / max(n + more, 1)
        ), n + more

    def read(self) -> SiteNumbers:
        """The means since the last read, once."""
        return {
            of: PartialValue(
                value=x, weight=torch.full_like(x, n), how=self._reductions[of]
            )
            for of, (x, n) in self.taken().items()
            if n
        }
