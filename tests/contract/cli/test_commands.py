"""The exit codes of the commands, what they write, and that a refused command begins nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.command import qkeel

RUN = (
    *(
        "run",
        "--steps",
        "4",
        "--d-model",
        "32",
        "--n-heads",
        "2",
        "--context",
        "16",
        "--data",
        "topics",
    ),
    *("--log-every", "2", "--device", "cpu"),
)


def test_a_run_is_recorded_its_page_written_and_its_figures_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert qkeel(*RUN, "--remedy", "qk_norm", "--out", run) == 0
    assert (run / "DONE").exists()
    assert qkeel("report", run, "-o", tmp_path / "page.html") == 0
    assert (
        (tmp_path / "page.html")
        .read_text(encoding="utf-8")
        .startswith("<!doctype html>")
    )
    assert qkeel("check", run) == 0
    assert "logit" in capsys.readouterr().out


CODES = {
    "--version": 0,
    "remedies": 0,
    "presets": 0,
    "explain lalr:tau=0.1+qk_clip:threshold=100": 0,
    "explain lalrr": 2,
    "check": 2,
    "check nothing.safetensors": 2,
    "scan nothing.safetensors": 2,
    "report nowhere": 2,
    "run --steps -1": 2,
    "run --stepz 1": 2,
    "nothing": 2,
}


@pytest.mark.parametrize("words", CODES)
def test_exit_codes(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert qkeel(*words.split()) == CODES[words]
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_run_that_collapses_says_so_by_its_exit_code_if_asked(tmp_path: Path) -> None:
    words = (
        *RUN,
        "--optimizer",
        "sgd",
        "--lr",
        "1e30",
        "--grad-clip",
        "0",
        "--out",
        tmp_path / "run",
    )
    assert qkeel(*words) == 0
    assert qkeel(*words, "--fail-on-collapse") == 3
