"""Trainings by the trainers of others on two processes, watched and clipped, are those of one process."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.integrations.trainers.run import STEPS, Outcome
from tests.integrations.trainers.watched import CASES as WATCHED

# By trainer and setup: how far weights and recorded numbers (relative to those above 1) may be from one process.
ROUNDING = 1e-12
CASES = {
    "huggingface.ddp": ("transformers", ROUNDING),
    "huggingface.fsdp2": ("transformers", ROUNDING),
    "lightning_ddp.closure": ("lightning", ROUNDING),
}


def found_of(case, folder, *, processes):
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
def test_two_processes_train_and_measure_as_one(case, tmp_path):
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
            assert_allclose(
                found.heads[name], values, rtol=most, atol=most, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", WATCHED)
def test_watching_changes_no_bit_of_a_training_by_others(case, tmp_path):
    pytest.importorskip(WATCHED[case][0])
    results = []
    for option in ("plain", "watch"):
        folder = tmp_path / option
        folder.mkdir()
        module = "tests.integrations.trainers.watched"
        command = [sys.executable, "-m", module, case, str(folder), option]
        done = subprocess.run(command, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(pickle.loads((folder / "result.pickle").read_bytes()))
    (losses, weights, _), (watched_losses, watched_weights, recorded) = results
    assert len(losses) > 1
    assert watched_losses == losses
    assert {*watched_weights} == {*weights}
    for name, weight in weights.items():
        assert torch.equal(watched_weights[name], weight), name
    steps, heads, share = recorded
    # Of nnsight's first trace nothing is known, and said so: its output is made anew.
    assert len(steps) >= len(losses) - (case == "nnsight")
    assert not share.startswith("0")
    assert np.isfinite(heads["max_logit"]).all()
