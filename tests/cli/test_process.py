"""What a command sets up in its process, and when it writes a page: without a run."""

import io
import sys
from types import SimpleNamespace

import pytest

from qkeel.cli import run
from qkeel.cli.output import open_output
from qkeel.cli.python_program import Program, prepare


@pytest.mark.parametrize("is_module", [False, True])
def test_a_program_finds_what_python_would_let_it_find(
    tmp_path, monkeypatch, is_module
):
    """A script what lies beside it, a module what lies in the current folder."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text("1", encoding="utf-8")
    (tmp_path / "trainer_of_mine.py").write_text("2", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["before", *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    name = "trainer_of_mine" if is_module else str(folder / "train.py")
    program = Program(name=name, arguments=(), module=is_module)
    assert prepare(program) == (None if is_module else b"1")
    assert sys.path[0] == str(tmp_path if is_module else folder)


def test_output_shows_the_code_of_what_it_cannot_hold(
    monkeypatch,
):
    strict = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    chosen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(sys, "stdout", strict)
    monkeypatch.setattr(sys, "stderr", chosen)
    open_output()
    for stream in (strict, chosen):
        stream.write("é")
        stream.flush()
    assert strict.buffer.getvalue() == b"\\xe9"
    assert chosen.buffer.getvalue() == b"?"


def test_a_page_is_written_at_the_second_run_and_then_once_in_a_while(
    tmp_path, monkeypatch
):
    clock, written = SimpleNamespace(monotonic=lambda: 0.0), []
    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(run, "write", lambda *args, **kwargs: written.append(args))
    page = run.StudyPage(tmp_path)
    counts = []
    for seconds in (0.0, 0.0, 0.0, run.PAGE_SECONDS, 1.5 * run.PAGE_SECONDS):
        clock.monotonic = lambda seconds=seconds: seconds
        page.on_outcome(None)
        counts.append(len(written))
    assert counts == [0, 1, 1, 2, 2]
