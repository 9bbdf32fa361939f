"""The translation study: remedies on an encoder–decoder that learns from few pairs, where QK-norm comes from."""

from __future__ import annotations

from qkeel.lab.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.plan import AXIS_OPTIONS, OPTIMIZERS, Grid, Study, parts

# Henry et al. 2020, arXiv 2010.04245: unit queries and keys, and one learned scale for all heads of a layer.
ORIGIN = "qk_norm:kind=l2,gain=scalar"
DEFAULT = Grid(remedies=("none", ORIGIN, "qk_norm", "lalr:tau=0.1"), lrs=(0.003, 0.01, 0.03, 0.1), seeds=(0, 1, 2))
BASE = RunConfig(
    model=ModelConfig(d_model=64, n_layers=2),
    data=DataConfig(source="topics", task="translation", context=48, batch=16),
    optim=OptimConfig(lr=0.01),
    steps=600,
    log_every=50,
    checkpoint_every=200,
    eval_sequences=128,
)
STUDY = Study(
    help="By default none, the norm of the first paper, qk_norm and lalr:tau=0.1 at 0.003, 0.01, 0.03 and 0.1, on 1000 "
    "pairs of 48 bytes. Finished runs are kept, killed ones resume, and the directory takes more later.",
    grid=DEFAULT,
    runs=parts,
    base=BASE,
    options=(*AXIS_OPTIONS, OPTIMIZERS),
    decides=(("optim", "lr"), ("data", "task")),
)
