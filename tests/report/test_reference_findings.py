"""A study's page says what counting alone predicts, and what each remedy gains over attention that is never trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from qkeel.lab import Execution, Grid, RunConfig, make_plan, run_plan
from qkeel.lab.config import DataConfig
from qkeel.lab.tasks import TextTask, counted_bigrams
from qkeel.lab.text import bigram_loss
from qkeel.report.study.collect import collect
from qkeel.report.study.findings import reference_findings
from qkeel.report.study.page import chart_data


def test_the_lines_are_made_of_the_runs_of_a_study(tmp_path: Path) -> None:
    base = RunConfig(steps=4, eval_sequences=8, device="cpu", log_every=4)
    grid = Grid(remedies=["none", "frozen_qk"], lrs=[0.01], seeds=[0, 1])
    run_plan(make_plan("lr", base, grid), tmp_path, Execution())
    study = collect(tmp_path)
    level = np.mean([counted_bigrams(dataclasses.replace(base, seed=seed)) for seed in (0, 1)])
    counted, frozen = (one.text for one in reference_findings(study))
    assert f"predicts the held-out text at {level:.3f} nats/byte" in counted
    assert chart_data(study)["counted"] == pytest.approx(level, abs=1e-3), "the line of the chart of losses"
    assert "Of the mean losses of 2 remedy-rate pairs 2 are not below that." in counted, "four steps learn little"
    rows = {(row["remedy"], row["seed"]): row["val_loss"] for row in study.rows()}
    gain = np.mean([rows["frozen_qk", seed] - rows["none", seed] for seed in (0, 1)])
    assert frozen.startswith("Gain over queries and keys that are never trained (frozen_qk) at LR 0.01, nats: none ")
    assert f"none {gain:+.3f}".replace("-", "−") in frozen.replace("-", "−")


def test_what_is_counted_is_what_the_run_reads() -> None:
    config = RunConfig(steps=3, seed=5, eval_sequences=4, device="cpu")
    task = TextTask(config)
    texts = [np.concatenate([b.inputs, b.targets[:, -1:]], 1) for b in (task.batch(5, step) for step in range(3))]
    held = task.heldout(4)
    whole = np.concatenate([held.inputs, held.targets[:, -1:]], 1)
    assert counted_bigrams(config) == bigram_loss(np.concatenate(texts), whole, 256)
    assert counted_bigrams(dataclasses.replace(config, remedy="qk_norm", data=config.data)) == counted_bigrams(config)
    assert counted_bigrams(dataclasses.replace(config, data=DataConfig(needle=0.5, context=64))) is None
    assert counted_bigrams(dataclasses.replace(config, steps=1 << 20)) is None


def test_a_study_without_the_arm_or_the_count_has_no_line(tmp_path: Path) -> None:
    base = RunConfig(steps=1, eval_sequences=1, device="cpu", data=DataConfig(needle=0.5, context=64))
    run_plan(make_plan("lr", base, Grid(remedies=["none"], lrs=[0.01], seeds=[0])), tmp_path, Execution())
    assert reference_findings(collect(tmp_path)) == []
