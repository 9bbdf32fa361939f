"""A run small enough to be done in a tenth of a second."""

import pytest

from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.config import with_values

TINY = RunConfig(
    model=ModelConfig(d_model=16, n_layers=2, n_heads=2),
    data=DataConfig(source="topics", context=8, batch=2),
    optim=OptimConfig(lr=0.1),
    steps=12,
    log_every=2,
    checkpoint_every=4,
    eval_sequences=4,
    probe_sequences=2,
    device="cpu",
)


@pytest.fixture(scope="session")
def tiny():
    """A tiny configuration; keywords are those of `with_values`."""

    def make(**fields):
        return with_values(TINY, **fields)

    return make
