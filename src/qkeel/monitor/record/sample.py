"""One record of a watched model: what the sinks get."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.records import HEAD_FIELDS, VALUE_FIELDS, fold_heads, layer_fields

HISTOGRAMS = ("max_logit", "entropy")  # fields whose distribution over the heads trackers get


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The measurements of one step: numbers by name, of the whole model (records.STEP_FIELDS and VALUE_FIELDS) and of
    each head (records.HEAD_FIELDS, NaN where a layer has fewer heads or it was not measured).
    """

    step: int  #: optimizer steps done (forwards, where there is no optimizer)
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)  #: of the whole model
    layers: tuple[str, ...] = ()  #: names of the sites, constant over a run
    heads: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  #: [layers heads] each
    phase: Literal["train", "eval"] = "train"  #: mode of the passes that were measured

    def __post_init__(self) -> None:
        if self.phase not in ("train", "eval"):
            raise InvalidValueError(f"expected phase 'train' or 'eval', got {self.phase!r}")
        for name, values in self.heads.items():
            if values.ndim != 2 or len(values) != len(self.layers):
                raise ShapeError(f"expected {name} as [{len(self.layers)} layers, heads], got shape {values.shape}")

    def __repr__(self) -> str:
        """Short: the step and how much was measured."""
        size = f"{len(self.layers)} layers, {len(self.heads)} numbers per head"
        return f"<Sample of {self.phase} step {self.step:,}: {size}>"

    def by_layer(self, name: str) -> np.ndarray:
        """[layers]: a head field, folded over heads as records.HEAD_FIELDS says; NaN where nothing was measured."""
        return fold_heads(name, self.heads[name])

    def overall(self, name: str) -> float:
        """A head field folded over the whole model, else the value of that name, else NaN."""
        if name in self.heads:
            return float(fold_heads(name, self.heads[name].reshape(1, -1))[0])
        return float(self.values.get(name, math.nan))

    def head_values(self) -> dict[str, np.ndarray]:
        """Tracker keys of histograms, attn/heads/max_logit and attn/heads/entropy: the numbers of all heads.

        >>> Sample(step=0, layers=("a",), heads={"entropy": np.array([[1.0, np.nan]])}).head_values()
        {'attn/heads/entropy': array([1.])}
        """
        prefix = "eval/" if self.phase == "eval" else ""
        known = {
            name: values[np.isfinite(values)] for name in HISTOGRAMS if (values := self.heads.get(name)) is not None
        }
        return {f"{prefix}attn/heads/{name}": values for name, values in known.items() if len(values)}

    def summaries(self, per_layer: Sequence[str] | None = None) -> dict[str, float]:
        """Tracker keys with slashes: attn/max_logit, attn/layer_07/max_logit; never per head, never NaN.

        per_layer: which fields each layer gets a key for; None for those of records.HEAD_FIELDS that say so.

        The loss and the learning rate are left out: they are the trainer's own, under the trainer's names.
        """
        if per_layer is None:
            per_layer = layer_fields()
        digits = max(2, len(str(len(self.layers) - 1)))
        names = [*self.heads, *(n for n in self.values if n in HEAD_FIELDS and n not in self.heads)]
        found = {f"attn/{name}": self.overall(name) for name in names}
        for name in per_layer:
            if name in self.heads:
                for i, value in enumerate(self.by_layer(name)):
                    found[f"attn/layer_{i:0{digits}d}/{name}"] = float(value)
        for name, value in self.values.items():
            field, _, layer = name.partition("/")
            if field in VALUE_FIELDS:
                place = f"layer_{self.layers.index(layer):0{digits}d}/" if layer in self.layers else ""
                found[f"hidden/{place}{field}"] = float(value)
        prefix = "eval/" if self.phase == "eval" else ""
        return {prefix + key: value for key, value in found.items() if not math.isnan(value)}


def repeat_groups(values: np.ndarray, n_heads: int) -> np.ndarray:
    """[kv heads] -> [heads]: a key head's value stands at each query head of its group.

    Raises:
        ShapeError: the number of key heads does not divide `n_heads`.

    >>> repeat_groups(np.array([1.0, 2.0]), 4).tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if len(values) == 0 or n_heads % len(values):
        raise ShapeError(f"expected a number of key heads that divides {n_heads} heads, got {len(values)}")
    return np.repeat(values, n_heads // len(values))


def pad_layers(rows: Sequence[np.ndarray | None], n_heads: int) -> np.ndarray:
    """Layers of unlike head counts, or None where nothing was measured, as [layers n_heads] padded with NaN.

    >>> pad_layers([np.ones(2), None, np.ones(1)], 2).tolist()
    [[1.0, 1.0], [nan, nan], [1.0, nan]]
    """
    out = np.full((len(rows), n_heads), np.nan)
    for line, row in zip(out, rows, strict=True):
        if row is not None:
            line[: len(row)] = row
    return out
