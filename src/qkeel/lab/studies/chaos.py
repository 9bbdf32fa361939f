"""The chaos study: how far two runs part that differ by one float32 step in one weight."""

from __future__ import annotations

from qkeel.lab.config import RunConfig
from qkeel.lab.plan import Grid, Study, pairs

DEFAULT = Grid(
    remedies=("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "softcap:cap=50"),
    lrs=(0.01, 0.03, 0.1, 0.3),
    seeds=(0, 1, 2),
)
BASE = RunConfig(log_every=2)  # at high rates two runs part within ten steps

STUDY = Study(
    help="By default none, qk_norm, qk_clip:threshold=30, lalr:tau=0.1 and softcap:cap=50 at 0.01, 0.03, 0.1 and 0.3. "
    "Its chaos.json says what rounding alone does to each remedy at each rate; pages of other studies of the same "
    "configuration read it from the directory runs/chaos next to theirs, and mark what is no larger.",
    grid=DEFAULT,
    runs=pairs,
    base=BASE,
    decides=(("optim", "lr"), ("", "nudge")),
)
