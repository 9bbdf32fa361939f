from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.recorded import table

from qkeel.cli.app import main
from qkeel.errors import QkeelError, RunDirectoryError
from qkeel.lab import Execution, Grid, RunConfig, make_plan, merge_studies, run_plan
from qkeel.records import RunDirectory, read_json, write_json

Make = Callable[..., RunConfig]


def part(tiny: Make, out: Path, *seeds: int, **fields: object) -> Path:
    grid = Grid(remedies=["none", "qk_norm"], lrs=[0.1], seeds=seeds)
    run_plan(
        make_plan("lr", tiny(**{"steps": 6, **fields}), grid), out, Execution(command=f"qkeel study lr --seeds {seeds}")
    )
    return out


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def parts(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Seeds 0 and 1 in one directory, 1 and 2 in another, all three in a third."""
    base = tmp_path_factory.mktemp("parts")
    return part(tiny, base / "a", 0, 1), part(tiny, base / "b", 1, 2), part(tiny, base / "whole", 0, 1, 2)


@pytest.mark.slow
def test_parts_made_apart_give_the_table_of_one_study(parts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, whole = parts
    before = files(a), files(b)
    merged = merge_studies([b, a], tmp_path / "out")
    assert (len(merged.table), merged.done) == (6, 6)
    assert table(tmp_path / "out") == table(whole)
    assert before == (files(a), files(b))
    about, known = (read_json(p / "study.json") for p in (tmp_path / "out", whole))
    assert {**about, "command": ""} == {**known, "command": ""}
    assert about["command"].splitlines() == ["qkeel study lr --seeds (1, 2)", "qkeel study lr --seeds (0, 1)"]


@pytest.mark.slow
def test_a_study_goes_on_in_the_merged_directory(tiny: Make, parts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, whole = parts
    shutil.copytree(b, tmp_path / "b")
    [first, *_] = sorted((tmp_path / "b" / "runs").iterdir())
    for name in ("DONE", "summary.json"):
        (first / name).unlink()
    merged = merge_studies([tmp_path / "b"], tmp_path / "alone")
    assert merged.done == 3
    # The run that is not done in one part is taken from the other, if it is there.
    seed = RunDirectory(first).config()["seed"]
    assert merge_studies([tmp_path / "b", a], tmp_path / "both").done == (6 if seed == 1 else 5)
    part(tiny, tmp_path / "alone", 0, 1, 2)
    assert table(tmp_path / "alone") == table(whole)


def test_a_run_with_other_results_is_told(parts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, _ = parts
    shutil.copytree(b, tmp_path / "b")
    for run in (tmp_path / "b" / "runs").iterdir():
        if (a / "runs" / run.name).exists():
            summary = read_json(run / "summary.json")
            write_json(run / "summary.json", {**summary, "val_loss": summary["val_loss"] + 1e-7})
    with pytest.raises(RunDirectoryError, match="different results; the first difference is val_loss of the summary"):
        merge_studies([tmp_path / "b", a], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_what_can_not_be_merged_is_told(tiny: Make, parts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, _ = parts
    other = part(tiny, tmp_path / "longer", 5, steps=14)
    for sources, error in (
        ([a, other], r"longer contains a study with a different configuration \(these differ: steps\)"),
        ([a, a], "given twice"),
        ([a, tmp_path], "study.json"),
        ([], "got none"),
    ):
        with pytest.raises(QkeelError, match=error):
            merge_studies(sources, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(RunDirectoryError, match="it is not an empty directory"):
        merge_studies([a, b], other)
    shutil.copytree(a, tmp_path / "linked")
    run = next((tmp_path / "linked" / "runs").iterdir())
    (run / "more").symlink_to("/dev/zero")
    with pytest.raises(RunDirectoryError, match="character device"):
        merge_studies([tmp_path / "linked"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_merges_and_writes_the_page(
    parts: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["merge", str(parts[0]), str(parts[1]), "--out", str(out)]) == 0
    assert capsys.readouterr().out.split("\n")[0] == "6 runs, 6 done"
    assert (out / "report.html").stat().st_size > 10_000
    assert main(["merge", str(parts[0]), "--out", str(out)]) == 2
    assert "it is not an empty directory" in capsys.readouterr().err


def test_parts_that_were_computed_otherwise_are_not_merged(parts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, _ = parts
    shutil.copytree(b, tmp_path / "b")
    for file in (tmp_path / "b" / "runs").glob("*/env.json"):
        env = read_json(file)
        write_json(file, {**env, "compiled_kernels": not env["compiled_kernels"]})
    with pytest.raises(RunDirectoryError, match="compiled_kernels: "):
        merge_studies([a, tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
