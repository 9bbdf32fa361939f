"""Trainings by the trainers of others on two processes, watched and clipped, are those of one process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.integrations.trainers.run import STEPS, Outcome
from tools.programs.__main__ import Runs
from tools.programs.data import write_tokenizer_and_model

import qkeel

# By trainer and setup: how far weights and recorded numbers (relative to those above 1) may be from one process.
ROUNDING = 1e-12
IN_FLOAT32 = 1e-4  # torchtitan knows no float64: gradients of other orders of summation, through four steps of AdamW
CASES = {
    "huggingface.ddp": ("transformers", ROUNDING),
    "huggingface.fsdp2": ("transformers", ROUNDING),
    "lightning_ddp.closure": ("lightning", ROUNDING),
    "torchtitan_debug.fsdp2": ("torchtitan", IN_FLOAT32),
    "torchtitan_debug.tp": ("torchtitan", IN_FLOAT32),
}


def found_of(case: str, folder: Path, *, processes: int) -> list[Outcome]:
    """What each process of a training holds at its end."""
    module = ["-m", "tests.integrations.trainers.run", case, str(folder)]
    several = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    command = [sys.executable, *(several if processes > 1 else []), *module]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = range(processes) if processes > 1 else ["alone"]
    found = [
        pickle.loads((folder / f"{case}-{name}.pickle").read_bytes()) for name in names
    ]
    for one in found:
        assert isinstance(one, Outcome), one
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_and_measure_as_one(case: str, tmp_path: Path) -> None:
    package, most = CASES[case]
    pytest.importorskip(package)
    (one,) = found_of(case, tmp_path, processes=1)
    both = found_of(case, tmp_path, processes=2)
    assert one.heads["max_logit"][0].max() > 0.02  # there is something to clip
    for found in both:
        assert found.steps == one.steps == [*range(STEPS)]
        for name, weight in one.weights.items():
            assert float((found.weights[name] - weight).abs().max()) < most, name
        assert {*found.heads} == {*one.heads}
        for name, values in one.heads.items():
            np.testing.assert_allclose(
                found.heads[name], values, rtol=most, atol=most, err_msg=name
            )


@pytest.fixture
def torchtitans(request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    """Runs of torchtitan's program with its own settings, on data that is made here."""
    pytest.importorskip("torchtitan")
    data = tmp_path / "checkouts/data"
    data.mkdir(parents=True)
    text = (Path(__file__).parents[2] / "README.md").read_text()
    write_tokenizer_and_model(data, text)
    lines = [json.dumps({"text": line}) for line in text.splitlines() if len(line) > 60]
    (data / "sft").mkdir()
    (data / "sft/train.jsonl").write_text("\n".join(lines))
    given = Namespace(
        work=tmp_path, checkouts=data.parent, python=sys.executable, timeout=300
    )
    return Runs(request.param, given)


def said(runs: Runs) -> str:
    return (runs.given.work / f"{runs.label}-watch.log").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "torchtitans", ["torchtitan", "torchtitan, two processes"], indirect=True
)
def test_torchtitans_program_has_the_same_losses_watched_and_takes_remedies_or_they_are_refused(
    torchtitans: Runs,
) -> None:
    plain, watched = torchtitans.run("plain"), torchtitans.run("watch", "--every", "1")
    assert plain["code"] == watched["code"] == 0, said(torchtitans)
    assert len(plain["losses"]) >= 90  # of ten steps, eight pieces and their sum
    assert plain["losses"] == watched["losses"]
    assert (watched["layers"], watched["records"], watched["events"]) == (6, 10, [])
    normed = torchtitans.run("watch", "--every", "1", "--apply", "qk_norm")
    assert (normed["code"], normed["layers"], normed["records"]) == (0, 6, 10), said(
        torchtitans
    )
    heads = qkeel.load(
        torchtitans.given.work / f"{torchtitans.label}-watch.qkeel"
    ).history.heads
    for side in (
        "query_norm",
        "key_norm",
    ):  # the root of a head's width, in bfloat16, times a gain near one
        np.testing.assert_allclose(heads[side], 4, rtol=1e-2)
    clipped = torchtitans.run(
        "watch", "--every", "1", "--apply", "lalr:tau=0.1+qk_clip:threshold=0.4"
    )
    assert (clipped["code"], clipped["layers"], clipped["records"]) == (0, 6, 10), said(
        torchtitans
    )
    assert clipped["last"] < 0.6 < 0.9 < watched["last"]
    assert torchtitans.run("watch", "--apply", "softcap:cap=1")["code"] != 0
    assert "softcap:cap=1 cannot be applied" in said(torchtitans)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchtitans_trainer_with_sites_found_before_it_checkpoints_activations_ends_with_the_same_bits_watched(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchtitan")
    plain = found_of("torchtitan_debug.defaults_alone", tmp_path, processes=2)
    watched = found_of("torchtitan_debug.defaults", tmp_path, processes=2)
    for without, one in zip(plain, watched, strict=True):
        assert one.steps == [*range(STEPS)]
        assert one.heads["max_logit"].shape[1] == 2  # layers
        assert np.isfinite(one.heads["max_logit"]).all()
        for name, weight in without.weights.items():
            assert torch.equal(one.weights[name], weight), name
