"""How far two runs that differ by one float32 step in one weight diverge: what rounding alone does.

    python -m experiments.studies.chaos --jobs 2

chaos.json has the effect of each remedy and rate. The default directory is runs/chaos.
"""

from __future__ import annotations

from pathlib import Path

from experiments.studies.command import main
from experiments.studies.pairs import pairs, write_pairs
from qkeel.lab import Grid, RunConfig, Study

CHAOS = Study(
    name="chaos",
    line="Train each configuration twice, with one weight changed by one float32 ulp, to measure numerical noise.",
    grid=Grid(
        remedies=(
            "none",
            "qk_norm",
            "qk_clip:threshold=30",
            "lalr:tau=0.1",
            "softcap:cap=50",
        ),
        lrs=(0.01, 0.03, 0.1, 0.3),
        seeds=(0, 1, 2),
    ),
    runs=pairs,
    base=RunConfig(log_every=2),  # at high rates two runs diverge within ten steps
)

if __name__ == "__main__":
    write_pairs(Path(main(CHAOS).path))
