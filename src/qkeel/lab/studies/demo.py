"""The two-minute demo: six remedies at constant rates, one comparison that it decides, and a longer pair."""

from __future__ import annotations

import dataclasses

from qkeel.lab.config import RunConfig, with_values
from qkeel.lab.plan import Grid, PlannedRun, Primary, Study, product

GRID = Grid(
    remedies=("none", "qk_norm", "lalr:tau=0.1", "qk_clip:threshold=30", "softcap:cap=50", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2, 3, 4, 5, 6, 7),
)
PRIMARY = Primary(
    remedy="qk_norm",
    lr=0.1,
    expected=0.1,
    spread=0.06,
    source="as on seeds 1000 to 1015, which the demo does not use: 0.057 with AVX2, 0.059 without",
)
ELSEWHERE = 2  # seeds at the rates where nothing is to be decided: all runs of a remedy make one stack
DRIFT = Grid(remedies=("none", "qk_norm"), lrs=(0.03,), seeds=(0,))


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid's runs, with all seeds at the rate of the primary comparison and the first two at the others,
    then no remedy against qk_norm at a moderate rate for 16/3 as many steps."""
    constant = with_values(base, optim={"schedule": "constant"})
    longer = with_values(constant, steps=base.steps * 16 // 3)
    kept = {lr: grid.seeds if lr == PRIMARY.lr else grid.seeds[:ELSEWHERE] for lr in grid.lrs}
    parts = [dataclasses.replace(grid, lrs=(lr,), seeds=seeds) for lr, seeds in kept.items()]
    return [*(run for part in parts for run in product(constant, part)), *product(longer, DRIFT, "drift")]


STUDY = Study(
    help="Six remedies at three constant rates, one comparison that is decided, and one longer pair.",
    grid=GRID,
    runs=runs,
    options=(),
    out="demo",
    primary=PRIMARY,
)
