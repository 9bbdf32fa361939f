"""Only regular files are read and written; a full disk, a full stream and paths of another directory are told."""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qkeel.cli.app import main
from qkeel.errors import RunDirectoryError
from qkeel.records import append_line, read_json, read_lines, write_text
from qkeel.records.disk import read_regular, refuse_path
from qkeel.records.run_directory import locked


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


ACTS: list[Callable[[Path], object]] = [
    read_json,
    read_regular,
    lambda path: list(read_lines(path)),
    lambda path: write_text(path, "new"),
    lambda path: append_line(path, {"step": 1}),
    lambda path: locked(path, "in use").__enter__(),
]


@pytest.mark.parametrize("make", [pipe, loop, device, Path.mkdir])
@pytest.mark.parametrize("act", ACTS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], act) -> None:
    make(tmp_path / "x")
    before = (tmp_path / "x").lstat()
    with pytest.raises(RunDirectoryError, match="xpected a regular file"):
        act(tmp_path / "x")
    assert (tmp_path / "x").lstat().st_ino == before.st_ino
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_link_to_a_file_is_read_and_a_file_that_is_too_large_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": 1}
    with pytest.raises(RunDirectoryError, match="has 8 bytes; expected at most 7"):
        read_regular(tmp_path / "file", most=7)
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(RunDirectoryError, match="expected at most"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0b", "a\nb", "a" * 300])
def test_a_path_is_no_name_of_an_entry(name: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"study\.json names"):
        refuse_path(name, "study.json")


def test_a_disk_that_is_full_at_the_start_is_one_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as a full disk: no byte can be written
    try:
        with pytest.raises(RunDirectoryError, match="Choose a writable directory with free space"):
            locked(tmp_path / "lock", "in use").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_stream_of_output_is_said_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        assert main(["presets"]) == 1
    assert f"cannot write the output: {os.strerror(errno.ENOSPC)}" in capsys.readouterr().err
