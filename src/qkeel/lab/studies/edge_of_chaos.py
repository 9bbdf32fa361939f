"""The study of the edge of chaos: the rate from which on two runs that differ by one float32 step part exponentially."""

from __future__ import annotations

from qkeel.lab.plan import Grid, Study
from qkeel.lab.studies import chaos

# All of them train in stacks; σReparam and what acts inside a run's own forward pass do not.
REMEDIES = (
    "none",
    "qk_norm",
    "qkv_norm",
    "key_norm",
    "softcap:cap=50",
    "qk_clip:threshold=30",
    "lalr:tau=0.1",
    "qk_lr:factor=0.1",
    "sigmoid",
    "peri_norm",
)
LRS = tuple(0.003 * 2**k for k in range(9))
GRID = Grid(remedies=REMEDIES, lrs=LRS, seeds=range(8), d_model=(16, 32, 64, 128))
STUDY = Study(
    help="By default ten remedies at nine rates, 0.003 to 0.768 in factors of 2, on four widths with 8 seeds: 5,760 "
    "runs. Its chaos.json has the exponent of each pair; python -m predictions judges what was predicted of them.",
    grid=GRID,
    runs=chaos.runs,
    base=chaos.BASE,
    decides=chaos.STUDY.decides,
)
