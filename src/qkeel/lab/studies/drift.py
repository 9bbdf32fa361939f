"""The drift study: how the largest logit grows with rate, steps, schedule and sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from qkeel.lab.axes import at
from qkeel.lab.config import RunConfig
from qkeel.lab.plan import Grid, PlannedRun, Study, product

GRID = Grid(remedies=("none",), lrs=(0.003, 0.01, 0.03, 0.1, 0.3), seeds=range(8))
HELD_OUT = Grid(remedies=("none",), lrs=(0.01, 0.03, 0.1), seeds=range(104, 108))
Size = tuple[int, int, int]  # width, blocks, size of a head
SIZES = tuple((width, depth, 16) for width in (32, 64, 128) for depth in (1, 2, 4))
# Each is changed alone.
MIDDLE = (64, 2, 16)
HEADS = ((64, 2, 8), (64, 2, 32))
SETTINGS = ({"schedule": "constant"}, {"schedule": "wsd"}, {"steps": 75}, {"steps": 300})
# What the law is tested on: sizes, then settings at the one that lies between those it was fitted on.
HELD_OUT_SIZES = ((96, 3, 16), (64, 8, 16), (256, 2, 16), (256, 8, 16))
HELD_OUT_SETTING = {"schedule": "constant", "steps": 225}


def variant(base: RunConfig, size: Size, **settings: object) -> RunConfig:
    """Returns the configuration at width, blocks and size of a head, with schedule, steps and batch where given."""
    width, depth, head = size
    sizes = {"d_model": width, "n_layers": depth, "n_heads": width // head, "head_dim": head}
    return at(base, {**sizes, **settings})


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at every size that the law is fitted on, and two of its rates with each setting apart."""
    few = dataclasses.replace(grid, lrs=grid.lrs[1::2] or grid.lrs)
    found = [run for size in SIZES for run in product(variant(base, size), grid, _role(size))]
    found += [run for size in HEADS for run in product(variant(base, size), few, _role(size))]
    for settings in SETTINGS:
        found += product(variant(base, MIDDLE, **settings), few, _role(MIDDLE, settings))
    return found


def held_out_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at sizes outside of the fitted ones, and its higher rates under a setting not fitted on."""
    found = [run for size in HELD_OUT_SIZES for run in product(variant(base, size), grid, _role(size))]
    high = dataclasses.replace(grid, lrs=grid.lrs[1:] or grid.lrs)
    size = HELD_OUT_SIZES[0]
    return found + product(variant(base, size, **HELD_OUT_SETTING), high, _role(size, HELD_OUT_SETTING))


def _role(size: Size, settings: Mapping[str, object] | None = None) -> str:
    width, depth, head = size
    words = [f"width {width}", f"{depth} blocks", f"heads of {head}"]
    return ", ".join([*words, *(f"{name} {value}" for name, value in (settings or {}).items())])


_DECIDES = (
    *(("model", name) for name in ("d_model", "n_layers", "n_heads", "head_dim")),
    *(("optim", name) for name in ("lr", "schedule")),
    *(("data", "batch"), ("", "steps")),
)
STUDY = Study(
    help="Widths 32, 64 and 128, 1, 2 and 4 blocks, and heads, schedules, steps and batches apart from these: what the "
    "law of logit growth is fitted on. With --held-out the sizes that it is tested on, up to width 256 and 8 blocks.",
    grid=GRID,
    runs=runs,
    base=RunConfig(),
    decides=_DECIDES,
    instead={
        "held_out": Study(
            help="The sizes that the law is tested on, up to width 256 and 8 blocks.",
            grid=HELD_OUT,
            runs=held_out_runs,
            base=RunConfig(),
            decides=_DECIDES,
        )
    },
)
