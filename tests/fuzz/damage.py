"""Damage to files: bytes, values inside JSON, and files that are no files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import json_values

_MOST = 1 << 24  # bytes
_MARK = "here stands another value"
Damage = tuple[Any, ...]


def damages() -> SearchStrategy[Damage]:
    """What happens to one file."""
    place = st.floats(0, 1, allow_nan=False)
    return st.one_of(
        st.tuples(st.just("value"), st.lists(st.integers(0, 60), max_size=5), json_values()),
        st.tuples(st.just("lose"), st.lists(st.integers(0, 60), min_size=1, max_size=5)),
        st.tuples(st.just("over"), place, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("cut"), place),
        st.tuples(st.just("text"), json_values()),
        st.sampled_from([("folder",), ("pipe",), ("loop",), ("device",), ("gone",), ("twice",), ("hole",)]),
    )


def inflict(file: Path, damage: Damage) -> None:
    """Changes the file, which exists; one with a hole stays as it is."""
    if file.stat().st_size > _MOST:
        return
    kind, *rest = damage
    raw = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind != "gone":
        file.write_bytes(_changed(raw, kind, rest))
        if kind == "hole":
            os.truncate(file, 1 << 40)


def _changed(raw: bytes, kind: str, rest: list[Any]) -> bytes:
    if kind == "over":
        at = round(rest[0] * len(raw))
        return raw[:at] + rest[1] + raw[at + len(rest[1]) :]
    if kind == "insert":
        at = round(rest[0] * len(raw))
        return raw[:at] + rest[1] + raw[at:]
    if kind == "cut":
        return raw[: round(rest[0] * len(raw))]
    if kind == "twice":
        return raw + raw
    if kind == "text":
        return rest[0].encode("utf-8", "surrogatepass") + b"\n"
    return raw if kind == "hole" else _edited(raw, kind, rest)


def _edited(raw: bytes, kind: str, rest: list[Any]) -> bytes:
    """JSON, or lines of it, with one value replaced or lost; other files as they are."""
    lines = raw.split(b"\n")
    try:
        whole, line = json.loads(raw), None
    except (ValueError, RecursionError):  # an earlier harm may have nested it deeply
        line = rest[0][0] % max(1, len(lines) - 1) if rest[0] else 0
        try:
            whole = json.loads(lines[line])
        except (ValueError, RecursionError):
            return raw
    text = _placed(whole, rest[0], kind == "lose")
    if kind == "value":
        text = text.replace(json.dumps(_MARK), rest[1], 1)
    made = text.encode("utf-8", "surrogatepass")
    return made + b"\n" if line is None else b"\n".join([*lines[:line], made, *lines[line + 1 :]])


def _placed(whole: Any, way: list[int], lose: bool) -> str:
    """The JSON of a value with a mark at the end of the way, or without what is there."""
    inner, before, key = whole, None, None
    for turn in way:
        if not isinstance(inner, (dict, list)) or not inner:
            break
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        before, key = inner, keys[turn % len(keys)]
        inner = before[key]
    if before is None:
        return json.dumps(whole if lose else _MARK)
    if lose:
        del before[key]
    else:
        before[key] = _MARK
    return json.dumps(whole)
