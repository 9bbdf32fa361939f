"""Where runs are computed: the same digits everywhere, and what a worker leaves that was killed."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.lab.killing import die_in_the_first_run
from tests.lab.recorded import numbers

from qkeel.errors import (
    InvalidValueError,
    MissingLibraryError,
    QkeelError,
    UnknownNameError,
    needed,
)
from qkeel.lab import Execution, Grid, RunConfig, executors, make_plan, run_plan
from qkeel.lab.executors import (
    EXECUTORS,
    Job,
    Outcome,
    default_jobs,
    outcomes,
    parse_executor,
    work,
)

Make = Callable[..., RunConfig]
GRID = Grid(remedies=["none", "qk_norm"], lrs=[0.1], seeds=[0, 1])


def results(out: Path) -> dict[str, str]:
    return {run.name: repr(numbers(run)) for run in sorted((out / "runs").iterdir())}


@pytest.fixture(scope="module")
def one_process(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The results of the study in this process."""
    out = tmp_path_factory.mktemp("one")
    assert not run_plan(make_plan("lr", tiny(), GRID), out).failures
    return results(out)


def test_names_and_options_that_do_not_exist_are_refused() -> None:
    assert [parse_executor(name).name for name in EXECUTORS] == [
        "loky",
        "ray",
        "dask",
        "slurm",
    ]
    with pytest.raises(UnknownNameError, match="slurm"):
        parse_executor("slrum")
    for text in ("ray+dask", "loky:jobs=2", "ray:address=auto"):
        with pytest.raises(
            InvalidValueError, match="expected one executor of loky, ray, dask, slurm"
        ):
            parse_executor(text)
    assert (default_jobs("slurm:timeout_min=5"), default_jobs("ray")) == (16, -1)
    assert 1 <= default_jobs("loky") <= 4
    with pytest.raises(InvalidValueError, match="at least 1 worker"):
        list(outcomes([], 0, "loky", Path()))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("loky", "joblib"),
        ("ray", "ray"),
        ("dask", "distributed"),
        ("slurm", "submitit"),
    ],
)
def test_the_package_that_is_missing_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        QkeelError, match=rf"needs .* not installed: pip install .*{package}"
    ):
        list(outcomes([Job({}, "a", ""), Job({}, "b", "")], 2, name, tmp_path))


def test_a_library_that_lacks_one_of_its_own_is_told_apart_from_one_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_outside.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = r"broken: broken_outside imports not_there_at_all, .*pip install not_there_at_all"
    with (
        pytest.raises(MissingLibraryError, match=broken),
        needed("the executor x", "'qkeel[x]'"),
    ):
        import broken_outside  # noqa: F401
    missing = r"is not installed: pip install 'qkeel\[x\]'"
    with (
        pytest.raises(MissingLibraryError, match=missing),
        needed("the executor x", "'qkeel[x]'"),
    ):
        import not_there_at_all  # noqa: F401


def test_jobs_have_absolute_paths_and_outcomes_those_that_were_typed(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories: list[str] = []

    def elsewhere(
        jobs: list[Job], workers: int, executor: str, folder: Path
    ) -> Iterator[Outcome]:
        assert (workers, executor, folder) == (2, "dask", tmp_path / "study")
        with contextlib.chdir("/"):
            for job in jobs:
                directories.append(job.directory)
                yield work(job)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qkeel.lab.execute.outcomes", elsewhere)
    ended: list[Outcome] = []
    run_plan(
        make_plan("lr", tiny(), GRID),
        "study",
        Execution(executor="dask", workers=2, on_outcome=ended.append),
    )
    assert all(
        path.startswith(str(tmp_path / "study" / "runs")) for path in directories
    )
    assert {outcome.directory for outcome in ended} == {
        f"study/runs/{Path(path).name}" for path in directories
    }


def test_results_that_are_not_seen_here_are_errors(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkeel.lab.execute.NETWORK_WAIT", 0.1)
    monkeypatch.setattr(
        "qkeel.lab.execute.outcomes",
        lambda jobs, *_: (Outcome(job.directory) for job in jobs),
    )
    failures = run_plan(
        make_plan("lr", tiny(), GRID), tmp_path / "s", Execution(executor="ray")
    ).failures
    assert ["share" in outcome.error for outcome in failures] == [True] * 4


# Slurm: what is submitted, to commands that only keep it.


def command(folder: Path, name: str, text: str) -> None:
    """A command of this name in the folder."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


def test_what_is_submitted_to_slurm(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(
        submitit.Job, "_results_timeout_s", 0
    )  # for results of a job that has failed
    commands, kept = tmp_path / "bin", shlex.quote(str(tmp_path))
    commands.mkdir()
    for name, text in {
        "sbatch": f'cp "$1" {kept}/script.sh\necho "Submitted batch job 77"',
        "sacct": "echo 'JobID|State'\necho '77_0|FAILED'\necho '77_1|FAILED'",
        "scancel": "",
        "srun": "",
    }.items():
        command(commands, name, text)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    jobs = [
        Job(tiny(seed=seed).to_dict(), str(tmp_path / f"run-{seed}"), "")
        for seed in (0, 1)
    ]
    options = "slurm:slurm_partition=gpu,timeout_min=90,mem_gb=8,cpus_per_task=3,gpus_per_node=1"
    ended = list(outcomes(jobs, 2, options, tmp_path))
    script = (tmp_path / "script.sh").read_text()
    for line in [
        "--array=0-1%2",
        "--partition=gpu",
        "--time=90",
        "--mem=8GB",
        "--cpus-per-task=3",
        "--gpus-per-node=1",
    ]:
        assert f"#SBATCH {line}\n" in script, script
    assert {outcome.directory for outcome in ended} == {job.directory for job in jobs}
    assert all("run the same command again" in outcome.error for outcome in ended)


# Real engines on this machine.

PLACES = ["loky", "ray", "dask", "slurm:cluster=local"]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_an_engine_gives_the_bits_of_this_process_and_a_killed_worker_is_continued_by_the_same_command(
    place: str,
    tiny: Make,
    tmp_path: Path,
    one_process: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in {
        "ray": ("ray",),
        "dask": ("distributed",),
        "slurm": ("submitit",),
    }.get(place.partition(":")[0], ()):
        pytest.importorskip(package)
    root = str(Path(__file__).parents[2])  # workers import what kills them from there
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    plan = make_plan("lr", tiny(), GRID)
    execution = Execution(executor=place, workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(executors, "work", die_in_the_first_run)
        first = run_plan(plan, tmp_path / "s", execution)
    assert (tmp_path / "s" / "lock.died").exists()
    assert first.failures or place == "dask"  # which begins the run again by itself
    assert all(
        "run the same command again" in outcome.error for outcome in first.failures
    )
    assert not run_plan(plan, tmp_path / "s", execution).failures
    assert results(tmp_path / "s") == one_process
