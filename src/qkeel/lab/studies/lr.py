"""The learning-rate study: which remedies widen the range of rates that train well, and at what cost."""

from __future__ import annotations

from qkeel.lab.plan import AXIS_OPTIONS, OPTIMIZERS, Grid, Study, parts

DEFAULT = Grid(remedies=("none", "qk_norm", "lalr:tau=0.1"), lrs=(0.01, 0.03, 0.1, 0.3), seeds=(0, 1, 2))
# Source: Wortsman et al. 2023, arXiv 2309.14322, who sweep the peak rate over three decades.
STUDY = Study(
    help="By default none, qk_norm and lalr:tau=0.1 at 0.01, 0.03, 0.1 and 0.3. Finished runs are kept, killed ones "
    "resume, and the directory takes more remedies, rates and seeds later.",
    grid=DEFAULT,
    runs=parts,
    options=(*AXIS_OPTIONS, OPTIMIZERS),
)
