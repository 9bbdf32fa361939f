"""The transfer study: whether the order of remedies at one size, each at its own best rate, is that at another."""

from __future__ import annotations

from qkeel.lab.plan import ONE_OF_EACH, Grid, Study, product

LRS = tuple(0.006 * 2**k for k in range(5))
GRID = Grid(
    remedies=ONE_OF_EACH,
    lrs=LRS,
    seeds=range(8),
    tuning_seeds=(1000, 1001),
    d_model=(16, 32, 64),
    parametrisation=("standard", "mup"),
)
STUDY = Study(
    help="By default seven remedies, each at the best of five rates, 0.006 to 0.096 in factors of 2, on three widths "
    "in the standard parametrisation and in µP, with 8 seeds.",
    grid=GRID,
    runs=product,
)
