"""The edge of chaos: the rate above which two runs that start one float32 step apart diverge exponentially.

    python -m experiments.studies.edge --jobs 2

By default ten remedies at nine rates, for four widths with 8 seeds: 5,760 runs.
"""

from __future__ import annotations

from pathlib import Path

from experiments.studies import ONE_OF_EACH
from experiments.studies.command import main
from experiments.studies.pairs import pairs, write_pairs
from qkeel.lab import Grid, RunConfig, Study

EDGE_LRS = tuple(0.003 * 2**k for k in range(9))
EDGE = Study(
    name="edge",
    line="Pairs of runs one float32 step apart × remedies × rates × widths: the rate above which pairs diverge.",
    grid=Grid(
        remedies=ONE_OF_EACH, lrs=EDGE_LRS, seeds=range(8), d_model=(16, 32, 64, 128)
    ),
    runs=pairs,
    base=RunConfig(log_every=2),
)

if __name__ == "__main__":
    write_pairs(Path(main(EDGE).path))
