"""The study of the edge of chaos: the rate from which two runs one float32 step apart part exponentially."""

from __future__ import annotations

from qkeel.lab.config import RunConfig
from qkeel.lab.plan import ONE_OF_EACH, Grid, Study, pairs

LRS = tuple(0.003 * 2**k for k in range(9))
GRID = Grid(remedies=ONE_OF_EACH, lrs=LRS, seeds=range(8), d_model=(16, 32, 64, 128))
STUDY = Study(
    help="By default ten remedies at nine rates, 0.003 to 0.768 in factors of 2, on four widths with 8 seeds: "
    "5,760 runs. Its chaos.json and page have the exponent of each pair.",
    grid=GRID,
    runs=pairs,
    base=RunConfig(log_every=2),
    decides=(("optim", "lr"), ("", "nudge")),
)
