"""What the logs of trainers store is the run directory, for each cadence, start and accumulation: each number has its
own step, and there are no others."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.contract.integrations.stored import tensorboard_scalars

from qkeel.monitor import Adaptive, Cadence, LogSpaced
from qkeel.records import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

KEY = "attn/max_logit"
CADENCES: list[int | Cadence] = [
    1,
    7,
    LogSpaced(per_decade=4),
    Adaptive(least=2, most=6),
]
RUNS = list(
    itertools.product(CADENCES, (0, 13), (1, 3))
)  # the cadence, the first step, passes for each step
STEPS = 9


def recorded(path: Path) -> dict[int, float]:
    """The largest logit by step, as the run directory has it."""
    return {
        record["step"]: record["max_logit"] for record in RunDirectory(path).metrics()
    }


def test_what_a_trainer_logs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    from tests.contract.integrations.test_huggingface import (
        trained as trained_by_trainer,
    )

    from qkeel.integrations.huggingface import QkeelCallback

    for i, (every, first, accumulate) in enumerate(RUNS):
        here = tmp_path / f"run{i}"
        options: dict[str, Any] = {
            "folder": here,
            "gradient_accumulation_steps": accumulate,
            "logging_steps": 2,
        }
        if first:  # a first training, unwatched, leaves the checkpoint
            trained_by_trainer(
                max_steps=first, save_strategy="steps", save_steps=first, **options
            )
            options["resume"] = True
        sink = here / "watched"
        options |= {"report_to": ["tensorboard"], "max_steps": first + STEPS}
        seen = trained_by_trainer(QkeelCallback(every=every, sinks=sink), **options)
        expected, where = recorded(sink), (every, first, accumulate)
        assert max(expected) == first + STEPS - 1, where
        assert min(expected) >= first, where
        logs = [(h["step"], h[KEY]) for h in seen.state.log_history if KEY in h]
        for found in (logs, [*tensorboard_scalars(here, f"train/{KEY}").items()]):
            assert [step for step, _ in found] == list(expected), where
            assert dict(found) == pytest.approx(expected, rel=1e-6), where


def test_what_lightning_logs(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from tests.contract.integrations.test_lightning import fitted, logged

    from qkeel.integrations.lightning import QkeelCallback

    for i, (every, first, accumulate) in enumerate(RUNS):
        here, where = tmp_path / f"run{i}", (every, first, accumulate)
        options: dict[str, Any] = {
            "max_epochs": -1,
            "accumulate_grad_batches": accumulate,
        }
        if first:
            options["resume"] = str(here / "last.ckpt")
            begun = fitted(None, here, max_steps=first, **{**options, "resume": None})
            begun.save_checkpoint(options["resume"])
        loggers = [
            CSVLogger(here, name="csv", version=""),
            TensorBoardLogger(here / "tb"),
        ]
        callback = QkeelCallback(every=every, sinks=here / "watched")
        fitted(callback, here, logger=loggers, max_steps=first + STEPS, **options)
        expected = recorded(here / "watched")
        assert max(expected) == first + STEPS - 1, where
        assert min(expected) >= first, where
        for found in (logged(here / "csv"), tensorboard_scalars(here / "tb", KEY)):
            assert list(found) == list(expected), where
            assert found == pytest.approx(expected, rel=1e-6), where
