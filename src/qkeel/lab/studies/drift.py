"""The drift study: how the largest logit grows with rate, steps, schedule and sizes, without a remedy and with each."""

from __future__ import annotations

import dataclasses

from qkeel.lab.config import RunConfig
from qkeel.lab.plan import Grid, PlannedRun, Study, product

REMEDIES = ("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "softcap:cap=50")
GRID = Grid(remedies=REMEDIES, lrs=(0.003, 0.01, 0.03, 0.1, 0.3), seeds=(0, 1, 2))
HELD_OUT = Grid(remedies=REMEDIES, lrs=(0.003, 0.006, 0.01, 0.03, 0.06, 0.1), seeds=(100, 101, 102))
# Width, blocks, size of a head; every one of the settings that follow is changed alone at the second size.
SIZES = tuple((width, depth, 16) for width in (32, 64, 128) for depth in (1, 2, 4))
HEADS = ((64, 2, 8), (64, 2, 32), (128, 1, 32), (32, 4, 8))
HELD_OUT_SIZES = ((256, 2, 16), (64, 8, 16), (96, 3, 16), (256, 1, 32), (128, 8, 16), (256, 8, 16))
MIDDLE = ((64, 2, 16), (128, 2, 16))
SETTINGS = ({"schedule": "constant"}, {"schedule": "wsd"}, {"steps": 75}, {"steps": 300}, {"batch": 4}, {"batch": 16})


def variant(base: RunConfig, size: tuple[int, int, int], **settings: object) -> RunConfig:
    """Returns the configuration at width, blocks and size of a head, with schedule, steps and batch where given."""
    width, depth, head = size
    model = dataclasses.replace(base.model, d_model=width, n_layers=depth, n_heads=width // head, head_dim=head)
    optim = dataclasses.replace(base.optim, schedule=settings.get("schedule", base.optim.schedule))
    data = dataclasses.replace(base.data, batch=settings.get("batch", base.data.batch))
    return dataclasses.replace(base, model=model, optim=optim, data=data, steps=settings.get("steps", base.steps))


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at every size that the law is fitted on, then its first remedy with each setting changed."""
    first = dataclasses.replace(grid, remedies=grid.remedies[:1])
    found = []
    for size in SIZES:
        found += product(variant(base, size), grid, _role(size))
    for size in HEADS:
        found += product(variant(base, size), first, _role(size))
    for size in MIDDLE:
        for settings in SETTINGS:
            found += product(variant(base, size, **settings), first, _role(size, settings))
    return found


def held_out_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at every size that the law is tested on, then its first remedy under other settings."""
    first = dataclasses.replace(grid, remedies=grid.remedies[:1])
    found = []
    for size in HELD_OUT_SIZES:
        found += product(variant(base, size), grid, _role(size))
    for settings in ({"schedule": "constant", "steps": 225}, {"schedule": "wsd", "batch": 12}):
        size = (96, 3, 16)
        found += product(variant(base, size, **settings), first, _role(size, settings))
    return found


def _role(size: tuple[int, int, int], settings: dict[str, object] | None = None) -> str:
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
    instead={"held_out": Study(help="", grid=HELD_OUT, runs=held_out_runs, base=RunConfig(), decides=_DECIDES)},
)
