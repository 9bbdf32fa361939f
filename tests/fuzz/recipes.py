"""Recipes: TOML of any kind as configuration; what `qkeel config` prints is the same configuration again."""

from __future__ import annotations

import dataclasses
import tomllib
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import numbers, texts
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import scratch

from qkeel.cli.run import as_toml, configure
from qkeel.lab import RunConfig
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig

_SECTIONS = {"data": DataConfig, "optim": OptimConfig, "model": ModelConfig, "images": ImagesConfig, "study": None}
_RAW = [
    "[" * 2000,
    "a = " + "[" * 2000,
    "a = " + "9" * 5000,
    "a = 1e999",
    "steps = 2020-01-01",
    "[[data]]",
    "[data]\n[data]",
]
_RAW += [
    "steps = 1\nsteps = 2",
    "\xff",
    'remedy = """a\nb"""',
    "a.b.c = 1",
    "steps = 0x10",
    "steps = inf",
    "steps = nan",
    "\x00",
]


def inputs() -> SearchStrategy[str]:
    """The text of a recipe."""
    value = st.one_of(
        numbers().map(repr),
        texts().map(_quoted),
        st.sampled_from(["true", "[]", "{}", "2020-01-01", "[1, 'a']", "00:00:00"]),
    )
    top = _lines(RunConfig, value)
    parts = [
        st.builds("[{}]\n{}".format, st.just(name), _lines(cls, value) if cls else _axes(value))
        for name, cls in _SECTIONS.items()
    ]
    tables = st.lists(st.one_of(parts), max_size=2).map("\n".join)
    return st.one_of(*4 * [st.builds("{}\n{}".format, top, tables)], st.sampled_from(_RAW), st.text(max_size=30))


def _lines(cls: type, hostile: SearchStrategy[str]) -> SearchStrategy[str]:
    """Settings of a table, each once; most have a value that the field has or may have."""
    fields = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.tuples(*(_line(name, fields[name], hostile) for name in names))).map(
        "\n".join
    )


def _line(name: str, default: Any, hostile: SearchStrategy[str]) -> SearchStrategy[str]:
    if isinstance(default, bool):
        usual = st.sampled_from(["true", "false"])
    elif isinstance(default, float):
        usual = st.sampled_from([repr(default), "0.5", "0.25", "1", "0"])
    elif isinstance(default, int):
        usual = st.sampled_from([str(default), "1", "2", "8", "64"])
    else:
        usual = st.one_of(st.just(_quoted(default or "none")), texts().map(_quoted))
    return st.one_of(usual, usual, usual, hostile).map(f"{name} = {{}}".format)


def _axes(value: SearchStrategy[str]) -> SearchStrategy[str]:
    return st.lists(st.builds("{} = {}".format, st.sampled_from(["lrs", "seeds"]), value), max_size=2).map("\n".join)


def _quoted(text: str) -> str:
    escaped = "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in text if not 0xD800 <= ord(c) < 0xE000)
    return f'"{escaped}"'


def check(text: str) -> None:
    """Reads the recipe; prints it; the print is TOML and reads as the same configuration."""
    with scratch() as place:
        recipe = place / "a.toml"
        recipe.write_text(text, encoding="utf-8", errors="replace")
        config, study = configure(SimpleNamespace(), recipe)
        assert isinstance(study, dict)
        printed = as_toml(config)
        read: dict[str, Any] = tomllib.loads(printed)
        assert RunConfig.from_dict(read) == config, printed


HUNT = Hunt(inputs=inputs, check=check)
