"""How the largest logit grows with rate, steps, schedule and sizes: the runs to which the law of growth is fitted.

python -m experiments.studies.drift --jobs 2
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.studies.command import main
from qkeel.lab import Grid, PlannedRun, RunConfig, Study, product

GRID = Grid(remedies=("none",), lrs=(0.003, 0.01, 0.03, 0.1, 0.3), seeds=range(8))
HELD_OUT_GRID = Grid(remedies=("none",), lrs=(0.01, 0.03, 0.1), seeds=range(104, 108))
ModelSize = tuple[int, int, int]  # width, blocks, head size
SIZES = tuple((width, depth, 16) for width in (32, 64, 128) for depth in (1, 2, 4))
# Head sizes and settings are varied one at a time, around MIDDLE.
MIDDLE = (64, 2, 16)
HEADS = ((64, 2, 8), (64, 2, 32))
SETTINGS = (
    {"schedule": "constant"},
    {"schedule": "wsd"},
    {"steps": 75},
    {"steps": 300},
)
# The law is tested on these sizes, and with this setting at the size that lies between the fitted sizes.
HELD_OUT_SIZES = ((96, 3, 16), (64, 8, 16), (256, 2, 16), (256, 8, 16))
HELD_OUT_SETTING = {"schedule": "constant", "steps": 225}


def variant(base: RunConfig, size: ModelSize, **settings: Any) -> RunConfig:
    """Returns the configuration with this width, number of blocks and head size, and with further settings if given."""
    width, depth, head = size
    model = dataclasses.replace(
        base.model, d_model=width, n_layers=depth, n_heads=width // head, head_dim=head
    )
    optim = dataclasses.replace(
        base.optim, schedule=settings.get("schedule", base.optim.schedule)
    )
    return dataclasses.replace(
        base, model=model, optim=optim, steps=settings.get("steps", base.steps)
    )


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at every size on which the law is fitted, and two of its rates for each setting."""
    few = dataclasses.replace(grid, lrs=grid.lrs[1::2] or grid.lrs)
    found = [
        run for size in SIZES for run in product(variant(base, size), grid, _role(size))
    ]
    found += [
        run for size in HEADS for run in product(variant(base, size), few, _role(size))
    ]
    for settings in SETTINGS:
        found += product(
            variant(base, MIDDLE, **settings), few, _role(MIDDLE, settings)
        )
    return found


def held_out_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at sizes that are not fitted, and its higher rates under a setting that is not fitted."""
    found = [
        run
        for size in HELD_OUT_SIZES
        for run in product(variant(base, size), grid, _role(size))
    ]
    high = dataclasses.replace(grid, lrs=grid.lrs[1:] or grid.lrs)
    size = HELD_OUT_SIZES[0]
    return found + product(
        variant(base, size, **HELD_OUT_SETTING), high, _role(size, HELD_OUT_SETTING)
    )


def _role(size: ModelSize, settings: Mapping[str, object] | None = None) -> str:
    width, depth, head = size
    words = [f"width {width}", f"{depth} blocks", f"heads of {head}"]
    return ", ".join(
        [*words, *(f"{name} {value}" for name, value in (settings or {}).items())]
    )


DRIFT = Study(
    name="drift",
    line="Sizes × schedules × remedies × learning rates × seeds: how the largest logit grows while a model trains.",
    grid=GRID,
    runs=runs,
)
HELD_OUT = Study(
    name="drift",
    line="The sizes on which the law is tested, up to width 256 and 8 blocks.",
    grid=HELD_OUT_GRID,
    runs=held_out_runs,
)

if __name__ == "__main__":
    main(DRIFT)
