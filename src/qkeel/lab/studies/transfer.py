"""The transfer study: whether the order of remedies at one size, each at its own best rate, is that at another."""

from __future__ import annotations

from qkeel.lab.plan import TUNING_SEEDS, Grid, Study, product
from qkeel.lab.studies.edge_of_chaos import REMEDIES

LRS = tuple(0.003 * 2**k for k in range(6))
GRID = Grid(
    remedies=REMEDIES,
    lrs=LRS,
    seeds=range(16),
    tuning_seeds=TUNING_SEEDS,
    d_model=(16, 32, 64, 128),
    parametrisation=("standard", "mup"),
)
STUDY = Study(
    help="By default ten remedies, each at the best of six rates, 0.003 to 0.096 in factors of 2, on four widths in the "
    "standard parametrisation and in µP, with 16 seeds.",
    grid=GRID,
    runs=product,
)
