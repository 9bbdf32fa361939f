"""Whether the ranking of remedies, each at its best rate, is the same at another size.

python -m experiments.studies.transfer --jobs 2
"""

from __future__ import annotations

from experiments.studies import ONE_OF_EACH
from experiments.studies.command import main
from qkeel.lab import Grid, Study, product

TRANSFER_LRS = tuple(0.003 * 2**k for k in range(7))
TRANSFER = Study(
    name="transfer",
    line="Remedies at their tuned rates × sizes: whether a ranking holds at a larger size.",
    grid=Grid(
        remedies=ONE_OF_EACH,
        lrs=TRANSFER_LRS,
        seeds=range(16),
        d_model=(16, 32, 64, 128),
    ),
    runs=product,
)

if __name__ == "__main__":
    main(TRANSFER, tuning_seeds=(1000, 1001))
