"""Where runs are computed: the same digits everywhere, and what a worker leaves that was killed."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

import pytest
from tests.lab.killing import die_in_the_first_run
from tests.lab.recorded import table

from qkeel.errors import (
    InvalidValueError,
    QkeelError,
    UnknownNameError,
)
from qkeel.lab import Execution, Grid, executors, make_plan, run_plan
from qkeel.lab.executors import Job, Outcome, default_jobs, outcomes, parse_executor

GRID = Grid(remedies=["none"], lrs=[0.1], seeds=[0, 1])


def test_names_and_options_that_do_not_exist_are_refused():
    with pytest.raises(UnknownNameError, match="slurm"):
        parse_executor("slrum")
    for text in ("ray+dask", "loky:jobs=2", "ray:address=auto"):
        with pytest.raises(InvalidValueError, match="one executor of loky, ray, dask"):
            parse_executor(text)
    assert (default_jobs("slurm:timeout_min=5"), default_jobs("ray")) == (16, -1)
    assert 1 <= default_jobs("loky") <= 4
    with pytest.raises(InvalidValueError, match="at least 1 worker"):
        list(outcomes([], 0, "loky", Path()))


PACKAGES = {"loky": "joblib", "ray": "ray", "dask": "distributed", "slurm": "submitit"}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_that_is_missing_is_named(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(QkeelError, match=rf"pip install .*{PACKAGES[name]}"):
        list(outcomes([Job({}, "a", ""), Job({}, "b", "")], 2, name, tmp_path))


def test_jobs_have_absolute_paths_and_results_that_are_not_seen_here_are_errors(
    tiny, tmp_path, monkeypatch
):
    directories = []

    def elsewhere(jobs, workers, executor, folder):
        assert (workers, executor, folder) == (2, "dask", tmp_path / "study")
        for i, job in enumerate(jobs):
            directories.append(job.directory)
            with contextlib.chdir("/"):  # as another machine starts
                outcome = executors.work(job) if i else Outcome(job.directory)
            yield outcome

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qkeel.lab.execute.NETWORK_WAIT", 0.1)
    monkeypatch.setattr("qkeel.lab.execute.outcomes", elsewhere)
    ended = []
    execution = Execution(executor="dask", workers=2, on_outcome=ended.append)
    failures = run_plan(make_plan("lr", tiny(), GRID), "study", execution).failures
    assert ["share" in outcome.error for outcome in failures] == [True]
    assert directories == [str(tmp_path / outcome.directory) for outcome in ended]


# Slurm: what is submitted, to commands that only keep it.


def test_what_is_submitted_to_slurm(tiny, tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    # For results of a job that has failed.
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0)
    folder, kept = tmp_path / "bin", shlex.quote(str(tmp_path / "script.sh"))
    folder.mkdir()
    for name, text in {
        "sbatch": f'cp "$1" {kept}\necho "Submitted batch job 77"',
        "sacct": "echo 'JobID|State'\necho '77_0|FAILED'\necho '77_1|FAILED'",
        "scancel": "",
        "srun": "",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    jobs = [Job(tiny(seed=i).to_dict(), str(tmp_path / f"run-{i}"), "") for i in (0, 1)]
    options = "slurm:slurm_partition=gpu,timeout_min=90,mem_gb=8,gpus_per_node=1"
    ended = list(outcomes(jobs, 2, options, tmp_path))
    script = (tmp_path / "script.sh").read_text()
    for line in (
        "array=0-1%2",
        "partition=gpu",
        "time=90",
        "mem=8GB",
        "gpus-per-node=1",
    ):
        assert f"#SBATCH --{line}\n" in script, script
    assert {outcome.directory for outcome in ended} == {job.directory for job in jobs}
    assert all("run the same command again" in outcome.error for outcome in ended)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loky", "ray", "dask", "slurm:cluster=local"])
def test_what_a_killed_worker_leaves_is_continued_by_the_same_command(
    place, tiny, tmp_path, monkeypatch
):
    pytest.importorskip(PACKAGES[place.partition(":")[0]])
    # Workers import what kills them from there.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    plan, execution = (
        make_plan("lr", tiny(), GRID),
        Execution(executor=place, workers=2),
    )
    with monkeypatch.context() as patch:
        patch.setattr(executors, "work", die_in_the_first_run)
        first = run_plan(plan, tmp_path / "s", execution)
    assert (tmp_path / "s" / "lock.died").exists()
    assert first.failures or place == "dask"  # which begins the run again by itself
    errors = [outcome.error for outcome in first.failures]
    assert all("run the same command again" in error for error in errors)
    assert not run_plan(plan, tmp_path / "s", execution).failures
    run_plan(plan, tmp_path / "one")
    assert table(tmp_path / "s") == table(tmp_path / "one")


def test_a_single_job_is_done_in_this_process_however_many_workers_there_are(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(executors, "_by_joblib", lambda *_: pytest.fail("a process"))
    monkeypatch.setattr(executors, "work", lambda job: Outcome(job.directory))
    (outcome,) = outcomes([Job({}, "a", "")], 2, "loky", tmp_path)
    assert outcome.directory == "a"
