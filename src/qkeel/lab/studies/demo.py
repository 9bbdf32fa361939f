"""The two-minute demo: a small learning-rate study at constant rate, and one longer pair that shows the drift."""

from __future__ import annotations

from qkeel.lab.config import RunConfig, with_values
from qkeel.lab.plan import Grid, PlannedRun, Study, product

GRID = Grid(
    remedies=("none", "qk_norm", "lalr:tau=0.1", "qk_clip:threshold=30", "softcap:cap=50", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2, 3),
)
DRIFT = Grid(remedies=("none", "qk_norm"), lrs=(0.03,), seeds=(0,))


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid's runs, then no remedy against qk_norm at a moderate rate for 16/3 as many steps."""
    constant = with_values(base, optim={"schedule": "constant"})
    longer = with_values(constant, steps=base.steps * 16 // 3)
    return [*product(constant, grid), *product(longer, DRIFT, "drift")]


STUDY = Study(
    help="Six remedies at three constant rates, and one longer pair.", grid=GRID, runs=runs, options=(), out="demo"
)
