"""The axes of a grid that are settings of its runs: sizes, steps, parametrisation, schedule and weight decay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from qkeel.lab.config import RunConfig, with_values

# The section and name of the setting of each axis; the axis has the setting's name.
SETTINGS: dict[str, str] = {
    **dict.fromkeys(("d_model", "n_layers", "n_heads", "head_dim", "parametrisation"), "model"),
    **dict.fromkeys(("context", "batch"), "data"),
    **dict.fromkeys(("schedule", "weight_decay", "decay"), "optim"),
    "steps": "",
}


def variants(base: RunConfig, axes: Mapping[str, Sequence[object]]) -> Iterator[tuple[str, RunConfig]]:
    """Yields the configuration under every combination of values, and what tells it from the others in words.

    Axes of no or one value are in no name: such a grid has the names of one without axes.

    >>> [name for name, _ in variants(RunConfig(), {"d_model": (32, 64), "steps": (10,)})]
    ['d_model 32', 'd_model 64']
    """
    given = {axis: values for axis, values in axes.items() if values}
    for point in itertools.product(*given.values()):
        values = dict(zip(given, point))
        yield ", ".join(f"{axis} {value}" for axis, value in values.items() if len(given[axis]) > 1), at(base, values)


def at(base: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """The configuration with these values, those of a section all at once: one may not be possible without another."""
    fields: dict[str, dict[str, object]] = {"": {}}
    for axis, value in values.items():
        fields.setdefault(SETTINGS[axis], {})[axis] = value
    return with_values(base, **fields.pop(""), **fields)
