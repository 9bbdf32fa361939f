"""The table of other machines keeps the rows of conditions that are not run again, in the order of the conditions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tools.machines import ABOUT, CONDITIONS, _path_without_compilers, page, pieces_of, rows_of


def test_a_page_is_read_back_row_by_row_in_the_order_of_the_conditions() -> None:
    rows = {name: f"| {name} | how | 1,234 | 0 | 5 | 67 |\n" for name in reversed(CONDITIONS)}
    written = page(rows)
    assert written.startswith(ABOUT)
    assert dict(rows_of(written)) == rows
    assert list(dict(rows_of(written))) == list(CONDITIONS)


def test_a_path_without_compilers_has_the_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    compilers = ("c++", "g++", "gcc-12", "x86_64-linux-gnu-g++-12", "clang", "clang++-14", "cc")
    for name in (*compilers, "git", "python3", "accessdb"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), ""]))
    left = _path_without_compilers(tmp_path)
    assert not [name for name in compilers if shutil.which(name, path=left)]
    assert all(shutil.which(name, path=left) for name in ("git", "python3", "accessdb"))


def test_every_path_of_every_condition_exists() -> None:
    root = Path(__file__).parents[2]
    for name, condition in CONDITIONS.items():
        assert [path for path in condition.tests if not (root / path).exists()] == [], name


def test_pieces_have_each_file_once() -> None:
    pieces = pieces_of(("tests/metrics", "tests/kernels", "tests/kernels/native", "tests/test_machines.py"), 3)
    files = [file for piece in pieces for file in piece]
    assert len(set(files)) == len(files) > 30
    assert {"tests/test_machines.py", "tests/kernels/native/test_build.py"} < set(files)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert pieces_of(("tests/metrics",), 1) == [("tests/metrics",)]
