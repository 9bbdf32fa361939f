"""The study of the edge of chaos: the rate from which two runs one float32 step apart part exponentially."""

from __future__ import annotations

from qkeel.lab.config import RunConfig
from qkeel.lab.plan import ONE_OF_EACH, Grid, Study, pairs

LRS = tuple(0.012 * 2**k for k in range(6))
GRID = Grid(remedies=ONE_OF_EACH, lrs=LRS, seeds=range(4), d_model=(16, 32, 64))
STUDY = Study(
    help="By default seven remedies at six rates, 0.012 to 0.384 in factors of 2, on three widths with 4 seeds: "
    "1,008 runs. Its chaos.json and page have the exponent of each pair.",
    grid=GRID,
    runs=pairs,
    base=RunConfig(log_every=2),
    decides=(("optim", "lr"), ("", "nudge")),
)
