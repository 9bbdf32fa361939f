"""A run small enough to be done in a tenth of a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig

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
def tiny() -> Callable[..., RunConfig]:
    """A tiny configuration; keywords replace fields, those of the optimizer as `optim_lr=…`."""

    def make(**fields: object) -> RunConfig:
        optim = {
            k.removeprefix("optim_"): v
            for k, v in fields.items()
            if k.startswith("optim_")
        }
        plain = {k: v for k, v in fields.items() if not k.startswith("optim_")}
        return dataclasses.replace(
            TINY, optim=dataclasses.replace(TINY.optim, **optim), **plain
        )

    return make
