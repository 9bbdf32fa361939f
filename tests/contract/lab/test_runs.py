"""A run that was killed resumes to the bit; a study is the same on one worker and on two, and has a page."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.command import qkeel
from tests.forked import forkserver

from qkeel import lab, load
from qkeel.report import write

TIMES = ("cpu_seconds", "tokens_per_second", "mfu")


def tiny(**options: Any) -> lab.RunConfig:
    """A run of a quarter of a second."""
    model = lab.ModelConfig(d_model=16, n_heads=2, n_layers=2)
    data = lab.DataConfig(source="topics", context=8, batch=2)
    sizes = {
        "steps": 18,
        "log_every": 2,
        "checkpoint_every": 3,
        "eval_sequences": 4,
        "probe_sequences": 2,
    }
    return lab.RunConfig(
        **{"model": model, "data": data, **sizes, "device": "cpu", **options}
    )


def numbers(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """Every number of a run that does not depend on the machine's speed."""
    records = map(
        json.loads, (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    )
    timeless = [
        {name: x for name, x in record.items() if name not in TIMES}
        for record in records
    ]
    return timeless, (path / "heads.f32").read_bytes()


def start(config: lab.RunConfig, out: str) -> None:
    torch.set_num_threads(1)
    lab.run(config, out)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_that_was_killed_resumes_to_the_same_bits(
    dtype: str, tmp_path: Path
) -> None:
    config, cut = tiny(dtype=dtype, remedy="lalr:tau=0.3"), tmp_path / "cut"
    start(config, str(tmp_path / "whole"))
    killed = forkserver().Process(target=start, args=(config, str(cut)))
    killed.start()
    while killed.is_alive() and not (cut / "metrics.jsonl").exists():
        time.sleep(0.001)
    killed.kill()
    killed.join()
    start(config, str(cut))
    assert load(cut).status == "done"
    assert numbers(cut) == numbers(tmp_path / "whole")


def table(out: Path) -> list[dict[str, str]]:
    with open(out / "table.csv", newline="") as file:
        return [
            {name: value for name, value in row.items() if name not in TIMES}
            for row in csv.DictReader(file)
        ]


def test_a_study_on_two_workers_is_that_of_one_and_its_page_has_the_runs(
    tmp_path: Path,
) -> None:
    grid = {"remedies": ["none", "qk_norm"], "lrs": [0.01, 0.1], "seeds": [0]}
    for jobs in (1, 2):
        lab.study("lr", **grid, out=tmp_path / str(jobs), base=tiny(steps=6), jobs=jobs)
    assert table(tmp_path / "1") == table(tmp_path / "2")
    assert len(table(tmp_path / "1")) == 4
    write([tmp_path / "1"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "qk_norm" in page


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "dask", "slurm:cluster=local"])
def test_a_study_on_a_cluster_is_that_of_one_machine(
    engine: str, tmp_path: Path
) -> None:
    package = {"dask": "distributed", "slurm:cluster=local": "submitit"}.get(
        engine, engine
    )
    pytest.importorskip(package)
    grid = lab.Grid(remedies=["none", "qk_norm"], lrs=[0.1], seeds=[0])
    for name in ("loky", engine):
        execution = lab.Execution(executor=name, workers=2)
        assert not lab.run_plan(
            lab.make_plan("lr", tiny(), grid), tmp_path / name, execution
        ).failures
    assert table(tmp_path / engine) == table(tmp_path / "loky")


@pytest.mark.parametrize(
    "name", ["lr", "multimodal", "extrapolation", "translation", "mla"]
)
def test_every_study_can_be_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qkeel("study", name, "--dry-run", "--out", tmp_path / "study") == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "study").exists()
