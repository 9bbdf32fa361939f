"""Files are whole or absent; torn tails are dropped; damage before the tail is an error that says where."""

import json
import math
import os
import resource

import pytest
from tests.training import warned

from qkeel.errors import DamagedFileError, InvalidValueError, RunDirectoryError
from qkeel.records import (
    append_line,
    read_json,
    read_lines,
    read_object,
    write_json,
    write_text,
)
from qkeel.records.disk import (
    check_writable,
    locked,
    make_directory,
    refuse_path,
    replacing,
)
from qkeel.records.file_formats import read_toml


def test_what_is_written_is_read(tmp_path):
    value = {"a": 1, "b": [1.5, None, True, "x"], "c": {"d": math.inf, "e": -math.inf}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    json.loads(
        (tmp_path / "x.json").read_text(), parse_constant=pytest.fail
    )  # any JSON reader can
    write_json(tmp_path / "nan.json", {"x": math.nan})
    assert math.isnan(read_json(tmp_path / "nan.json")["x"])


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_text(tmp_path / "x.txt", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RunDirectoryError,
        match=r"x\.txt: No space left on device.*Existing files are not lost",
    ):
        write_text(tmp_path / "x.txt", "new")
    assert (tmp_path / "x.txt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next_for_the_same(
    tmp_path,
):
    for name in (".out.0123abcd.part", ".out.original.part", ".other.0123abcd.part"):
        (tmp_path / name).mkdir()
    with warned() as said, replacing(tmp_path / "out", directory=True) as temporary:
        (temporary / "x").write_text("new")
    assert (tmp_path / "out" / "x").read_text() == "new"
    assert [".out.0123abcd.part" in text for text in said] == [True]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", ".out.original.part", ".other.0123abcd.part"}


def test_an_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunDirectoryError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})
    with pytest.raises(RunDirectoryError, match="cannot append"):
        append_line(tmp_path / "file" / "x.jsonl", {})


@pytest.mark.parametrize("place", ["file/run", "file/a/run", "/proc/run/a"])
def test_a_place_that_cannot_hold_a_directory_is_told_before_anything_is_written(
    tmp_path, place
):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunDirectoryError, match="Choose a writable directory"):
        check_writable(tmp_path / place)
    for other in ("file", "new/run", "."):
        check_writable(tmp_path / other)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_was_moved_away_is_not_made_again(tmp_path):
    for write in (write_json, append_line):
        with pytest.raises(
            RunDirectoryError,
            match=r"the directory .*gone does not exist or was removed",
        ):
            write(tmp_path / "gone" / "x.json", {})
    with pytest.raises(
        RunDirectoryError,
        match=r"cannot create .*last: the directory .*gone does not exist",
    ):
        make_directory(tmp_path / "gone" / "last", parents=False)
    assert list(tmp_path.iterdir()) == []
    make_directory(tmp_path / "new" / "last")
    make_directory(tmp_path / "new" / "last", parents=False)
    assert (tmp_path / "new" / "last").is_dir()


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_file_torn_at_any_byte_gives_its_whole_lines(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    for i in range(2):
        append_line(path, {"step": i, "x": 0.5})
    size = path.stat().st_size
    os.truncate(path, size - cut)
    whole = (size - cut) // (size // 2)
    assert list(read_lines(path)) == [{"step": i, "x": 0.5} for i in range(whole)]


def test_a_damaged_line_in_the_middle_is_an_error_that_says_where(
    tmp_path,
):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \xff}\n{"a": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"m\.jsonl, line 2"):
        list(read_lines(path))


def test_a_missing_or_damaged_json_file_is_one_clear_error(tmp_path):
    with pytest.raises(RunDirectoryError, match="is missing"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1,\n "b"')
    with pytest.raises(RunDirectoryError, match=r"not complete JSON .*line 2"):
        read_json(tmp_path / "x.json")
    (tmp_path / "y.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunDirectoryError, match="t decode byte"):
        read_json(tmp_path / "y.json")


def test_files_of_earlier_versions_are_read_without_their_checksums(
    tmp_path,
):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\n{"step": 1, "crc32": "36644f0c"}\n')
    (tmp_path / "x.json").write_text('{"a": "nan", "crc32": "00000000"}')
    assert [*read_lines(tmp_path / "m.jsonl")] == [{"step": 0}, {"step": 1}]
    assert list(read_json(tmp_path / "x.json")) == ["a"]


@pytest.mark.parametrize("text", ["[1]", "3", "{}", '{"runs": null}'])
def test_an_object_without_what_is_required_is_one_clear_error(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"x\.json"):
        read_object(tmp_path / "x.json", "runs")


def test_json_that_is_nested_too_deeply_is_one_clear_error(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(DamagedFileError, match=r"x\.json is not complete JSON"):
        read_json(tmp_path / "x.json")


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "m.jsonl"
    append_line(path, {"step": 0})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (len(before) + 5, hard)
    )  # as a disk with room for five more bytes
    try:
        with pytest.raises(
            RunDirectoryError, match=r"cannot append to .*m\.jsonl: File too large"
        ):
            append_line(path, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0b", "a\nb", "a" * 300]
)
def test_a_path_is_no_name_of_an_entry(name):
    with pytest.raises(RunDirectoryError, match=r"study\.json names"):
        refuse_path(name, "study.json")


def test_a_disk_that_is_full_at_the_start_is_one_clear_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, hard)
    )  # as a full disk: no byte can be written
    try:
        with pytest.raises(
            RunDirectoryError, match="Choose a writable directory with free space"
        ):
            locked(tmp_path / "lock", "in use").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_toml_has_one_error_for_all_that_cannot_be_read(tmp_path):
    file = tmp_path / "a.toml"
    for text in ("a = [", "a = " + "[" * 5000, "a = " + "9" * 5000, "a = 1\na = 2"):
        file.write_text(text)
        with pytest.raises(InvalidValueError, match=r"a\.toml is not valid TOML"):
            read_toml(file)
