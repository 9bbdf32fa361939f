"""Files are whole or absent; torn tails are dropped; damage before the tail is an error that says where."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fuzz.disk_model import System

from qkeel.cli.app import main
from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.records import append_line, disk, read_json, read_lines, write_bytes, write_json, write_text
from qkeel.records.disk import check_seal, make_directory, read_regular, refuse_path, seal
from qkeel.records.run_directory import locked


def test_what_is_written_is_read(tmp_path: Path) -> None:
    value = {"a": 1, "b": [1.5, None, True, "x"], "c": {"d": math.inf, "e": -math.inf}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)  # any JSON reader can
    write_json(tmp_path / "nan.json", {"x": math.nan})
    assert math.isnan(read_json(tmp_path / "nan.json")["x"])


def test_files_are_readable_by_others_and_leave_no_temporary_behind(tmp_path: Path) -> None:
    write_text(tmp_path / "x.txt", "ü")
    write_bytes(tmp_path / "y.bin", b"\0\1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.txt", "y.bin"]
    assert (tmp_path / "x.txt").read_bytes() == "ü".encode()
    assert (tmp_path / "x.txt").stat().st_mode & 0o777 == 0o644


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "x.txt", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match=r"x\.txt: No space left on device.*Existing files are not lost"):
        write_text(tmp_path / "x.txt", "new")
    assert (tmp_path / "x.txt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunDirectoryError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})
    with pytest.raises(RunDirectoryError, match="cannot append"):
        append_line(tmp_path / "file" / "x.jsonl", {})


def test_a_directory_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    for write in (write_json, append_line):
        with pytest.raises(RunDirectoryError, match=r"the directory .*gone does not exist or was removed"):
            write(tmp_path / "gone" / "x.json", {})
    with pytest.raises(RunDirectoryError, match=r"cannot create .*last: the directory .*gone does not exist"):
        make_directory(tmp_path / "gone" / "last", parents=False)
    assert list(tmp_path.iterdir()) == []
    make_directory(tmp_path / "new" / "last")
    make_directory(tmp_path / "new" / "last", parents=False)
    assert (tmp_path / "new" / "last").is_dir()


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert list(read_lines(path)) == []
    for i in range(3):
        append_line(path, {"step": i, "x": math.inf})
    assert list(read_lines(path)) == [{"step": i, "x": math.inf} for i in range(3)]


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_file_torn_at_any_byte_gives_its_whole_lines(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    for i in range(2):
        append_line(path, {"step": i, "x": 0.5})
    size = path.stat().st_size
    os.truncate(path, size - cut)
    whole = (size - cut) // (size // 2)
    assert list(read_lines(path)) == [{"step": i, "x": 0.5} for i in range(whole)]


def test_a_damaged_line_in_the_middle_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \xff}\n{"a": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"m\.jsonl, line 2"):
        list(read_lines(path))


def test_a_missing_or_damaged_json_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is missing"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1,\n "b"')
    with pytest.raises(RunDirectoryError, match=r"not complete JSON \(line 2"):
        read_json(tmp_path / "x.json")
    (tmp_path / "y.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunDirectoryError, match="can't decode byte 0xff"):
        read_json(tmp_path / "y.json")


@pytest.mark.parametrize("indent", [None, 2])
def test_every_flipped_bit_of_a_text_is_noticed_or_takes_the_checksum_away(indent: int | None) -> None:
    text = seal({"step": 3, "crc32": "an older one", "loss": 0.25}, indent)
    assert check_seal(text, needed=True)
    assert json.loads(text) == {"step": 3, "loss": 0.25, "crc32": json.loads(text)["crc32"]}
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="checksum"):
            check_seal(bytes(flipped), needed=True)


def test_a_line_without_a_checksum_is_read_only_before_those_that_have_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n')
    append_line(path, {"step": 1})
    assert [line["step"] for line in read_lines(path)] == [0, 1]
    with pytest.raises(DamagedFileError, match=r"line 1 .* has no checksum"):
        list(read_lines(path, sealed=True))
    with open(path, "a") as file:
        file.write('{"step": 2}\n')
    append_line(path, {"step": 3})
    with pytest.raises(DamagedFileError, match=r"line 3 .* has no checksum"):
        list(read_lines(path))


def test_a_last_line_that_was_surely_written_is_damaged_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_line(path, {"step": 0})
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert list(read_lines(path)) == []
    with pytest.raises(DamagedFileError, match="line 1"):
        list(read_lines(path, sure=size))


class Nearly(System):
    """A disk that takes so many bytes more, in pieces of seven; it counts its waits."""

    def __init__(self, room: int) -> None:
        self.room, self.synced = room, 0

    def write(self, file: int, data: bytes | memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = os.write(file, data[: min(7, self.room)])
        self.room -= taken
        return taken

    def fsync(self, file: int) -> None:
        self.synced += 1


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_line(tmp_path / "m.jsonl", {"step": 0})
    before = (tmp_path / "m.jsonl").read_bytes()
    monkeypatch.setattr(disk, "os", Nearly(len(before) + 20))
    append_line(tmp_path / "m.jsonl", {"step": 1})
    with pytest.raises(RunDirectoryError, match=r"cannot append to .*m\.jsonl: No space left"):
        append_line(tmp_path / "m.jsonl", {"step": 2})
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [0, 1]
    assert (tmp_path / "m.jsonl").read_bytes().startswith(before)
    assert (tmp_path / "m.jsonl").stat().st_size == 2 * len(before)


def test_only_what_was_appended_since_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Nearly(10_000)
    monkeypatch.setattr(disk, "os", system)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    waits = []
    for written in ([0, 1], [0], [], [1]):
        for i in written:
            append_line(paths[i], {"step": 0})
        disk.sync(paths)
        waits.append(system.synced)
    assert waits == [3, 4, 4, 5]  # both files and the directory that names them; one; none; one


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
