"""The parsers of JSON, TOML and safetensors headers: what is sound is read, anything else is named with its place."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qkeel.errors import DataError, InvalidValueError, RunDirectoryError
from qkeel.records.file_formats import FIELDS, KINDS, check_parts
from qkeel.records.parse import parse_header, parse_json, read_header, read_toml, toml_line


def test_sound_json_is_read_as_python_reads_it() -> None:
    for text in ('{"a": [1, -2.5e3, null, true, "é𝄞"]}', "NaN", "[" * 60 + "]" * 60, str(2**64 - 1), str(-(2**63))):
        assert json.dumps(parse_json(text.encode(), "a.json")) == json.dumps(json.loads(text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1', "line 1, column 8"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"[" * 65 + b"]" * 65, "at most 64"),
        (b"[" * 100_000, "too deep"),
        (str(2**64).encode(), "at most 64 bits"),
        (b"9" * 5000, "5000 digits"),
        (b"-1e400", "below 1.8e308"),
        (b'"\\ud800"', "surrogate"),
        (b"\xff", "can't decode"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    ],
)
def test_what_other_parsers_read_otherwise_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(RunDirectoryError, match=reason):
        parse_json(text, "a.json")


@pytest.mark.parametrize("text", ["a\nb", 'a"\\b', "\x7f\x00\t", "é𝄞", "", "'''"])
def test_a_line_of_toml_reads_as_what_was_written(text: str) -> None:
    assert tomllib.loads(toml_line("name", text)) == {"name": text}


def test_toml_has_one_error_for_all_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for text in ("a = [", "a = " + "[" * 5000, "a = " + "9" * 5000, f"a = {2**70}", "a = 1e400", "a = 1\na = 2"):
        file.write_text(text)
        with pytest.raises(InvalidValueError, match=r"a\.toml is not valid TOML"):
            read_toml(file)
    with pytest.raises(InvalidValueError, match="Unicode"):
        toml_line("name", "\udcff")


def test_a_header_is_read_as_it_was_saved(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(0, 4, dtype=torch.float16), "c": torch.tensor(1)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in found.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (0, 4)),
        "c": ("I64", ()),
    }
    assert found.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "XX"}, "expected a dtype of"),
        ({"dtype": 1}, "expected a dtype of"),
        ({"shape": [2.0, 2]}, "as the shape"),
        ({"shape": [True, 4]}, "as the shape"),
        ({"shape": [-2, -2]}, "as the shape"),
        ({"shape": [1] * 65}, "at most 64 whole numbers"),
        ({"shape": [2**62, 2**62]}, "does not match F32 with shape"),
        ({"data_offsets": [0.0, 16.0]}, "to be a begin and an end"),
        ({"data_offsets": [16, 0]}, "to be a begin and an end"),
        ({"data_offsets": [8, 24]}, "leaves a gap after the header"),
        ({"data_offsets": [0, 12]}, "does not match F32 with shape"),
        ({"more": 1}, "expected dtype, shape and data_offsets"),
    ],
)
def test_a_header_with_one_wrong_field_is_named(change: dict[str, object], reason: str) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **change}
    with pytest.raises(DataError, match=rf"x\.safetensors has no readable safetensors header: .*{reason}"):
        parse_header(json.dumps({"a": entry}).encode(), Path("x.safetensors"), 1000)


def test_tensors_fill_the_file_one_after_the_other() -> None:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"a": one, "b": {**one, "data_offsets": [4, 12]}}).encode()
    with pytest.raises(DataError, match=r"'b' begins at byte .* and overlaps 'a'"):
        parse_header(text, Path("x"), 1000)
    text = json.dumps({"a": one}).encode()
    assert parse_header(text, Path("x"), 16 + len(text)).tensors["a"].end == 16 + len(text)
    for size, reason in ((15, "truncated"), (17, "has 1 bytes after")):
        with pytest.raises(DataError, match=reason):
            parse_header(text, Path("x"), size + len(text))


def test_every_field_of_a_file_has_a_known_kind_and_is_checked() -> None:
    for file, fields in FIELDS.items():
        for name, kind in fields.items():
            assert kind.removeprefix("!") in KINDS, (file, name)
    wrong = {"a number": "x", "text": 1, "an object": 1, "a list of text": [1], "true or false": 1, "sizes": "x"}
    for file, fields in FIELDS.items():
        for name, kind in fields.items():
            if kind in wrong and name != "*":
                needed = {n: 1 if "number" in k else "x" for n, k in fields.items() if k.startswith("!") and n != name}
                with pytest.raises(RunDirectoryError, match="expected"):
                    check_parts({**needed, name: wrong[kind]}, file, file)
