"""The task of a model: examples of (seed, step), held-out examples, and the model that fits them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkeel.lab.config import RunConfig
from qkeel.lab.data.corpus import Corpus


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs [n t] (tokens) or [n t p] (patches), right answers [n t] or [n], and their kinds [n t], if any."""

    inputs: Tensor
    targets: Tensor
    kinds: Tensor | None = None

    def to(self, device: torch.device) -> Examples:
        """The same on a device."""
        return Examples(*(None if x is None else x.to(device, non_blocking=True) for x in self._all()))  # type: ignore[arg-type]

    def split(self, count: int) -> list[Examples]:
        """The same in pieces of `count` examples."""
        parts = [[None] * len(self.inputs) if x is None else x.split(count) for x in self._all()]
        return [Examples(*piece) for piece in zip(*parts)]  # type: ignore[arg-type]

    def _all(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.inputs, self.targets, self.kinds


class Task(abc.ABC):
    """A resolved configuration's data and model. `kinds` names the kinds of targets, `trained` those it learns.

    `classes` names the classes of input tokens, by `input_classes`; `classifies` says that an answer is right or wrong.
    """

    kinds: Sequence[str] = ()
    trained: Sequence[str] = ()
    classes: Sequence[str] = ()
    classifies: bool = False
    corpus: Corpus

    @abc.abstractmethod
    def __init__(self, config: RunConfig) -> None:
        """Reads the data; raises DataError if it cannot be read or does not fit."""

    @abc.abstractmethod
    def batch(self, seed: int, step: int) -> Examples:
        """The examples of a step, a function of (seed, step) alone."""

    @abc.abstractmethod
    def heldout(self, count: int) -> Examples:
        """At most `count` held-out examples, the same for every run."""

    @abc.abstractmethod
    def build(self, generator: torch.Generator) -> nn.Module:
        """The model with its initial weights."""

    def input_classes(self, inputs: Tensor) -> Tensor:
        """The class of each input token [n t], a number of `classes`."""
        return torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
