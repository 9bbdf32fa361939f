"""The transfer study: whether the order of remedies at one size, each at its own best rate, is that at another."""

from __future__ import annotations

from qkeel.lab.plan import ONE_OF_EACH, Grid, Study, product

LRS = tuple(0.003 * 2**k for k in range(7))
GRID = Grid(
    remedies=ONE_OF_EACH,
    lrs=LRS,
    seeds=range(16),
    tuning_seeds=(1000, 1001),
    d_model=(16, 32, 64, 128),
    parametrisation=("standard", "mup"),
)
STUDY = Study(
    help="By default ten remedies, each at the best of seven rates, 0.003 to 0.192 in factors of 2, on four widths "
    "in the standard parametrisation and in µP, with 16 seeds.",
    grid=GRID,
    runs=product,
)
