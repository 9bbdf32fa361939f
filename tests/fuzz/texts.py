"""Texts that users give: spec strings, command lines, recipes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import numbers, texts
from tests.fuzz.hunt import Hunt

from qkeel import preset
from qkeel.cli.app import main
from qkeel.cli.commands import commands
from qkeel.cli.run import _ENTRIES, configure
from qkeel.errors import InvalidValueError, QkeelError
from qkeel.lab import LongContexts, RunConfig
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig
from qkeel.options import parse
from qkeel.remedies.apply import REMEDIES
from qkeel.remedies.apply import parse as parse_remedies
from qkeel.spec import PRESETS

# Spec strings: of remedies, of presets and of positions.


_spec_OPTIONS = [
    "tau",
    "cap",
    "threshold",
    "over",
    "gain",
    "base",
    "factor",
    "eps",
    "alpha",
    "ratio",
]
_spec_OPTIONS += ["window", "train_length"]


def spec_strings() -> SearchStrategy[tuple[str, str]]:
    """Who reads, and the text."""
    name = st.one_of(st.sampled_from([*REMEDIES, *PRESETS]), texts())
    value = st.one_of(
        numbers().map(str),
        texts(),
        st.sampled_from(["true", "head", "layer", "1e400", "0x1", "1_000"]),
    )
    option = st.builds(
        "{}={}".format, st.one_of(st.sampled_from(_spec_OPTIONS), texts()), value
    )
    term = st.builds(
        lambda n, options: ":".join([n, ",".join(options)]),
        name,
        st.lists(option, max_size=3),
    )
    text = st.one_of(
        st.lists(term, min_size=1, max_size=3).map("+".join),
        st.text(":=,+e1.a ", max_size=15),
        texts(),
    )
    return st.tuples(st.sampled_from(["terms", "remedies", "preset", "method"]), text)


def check_spec_strings(case: tuple[str, str]) -> object:
    """Reads the text; what reads it gives a value that can be printed."""
    reader, text = case
    if reader == "terms":
        try:
            terms = parse(text)
        except InvalidValueError:  # an empty name, or a colon without an option
            return None
        assert parse("+".join(map(str, terms))) == terms or "nan" in text.lower()
        return None
    if reader == "preset":
        name, _, rest = text.partition(":")
        return preset(name, **parse(f"x:{rest}")[0].options).explain()
    return (
        LongContexts(posthoc=[text]).posthoc
        if reader == "method"
        else str(parse_remedies(text))
    )


# Command lines of `qkeel`: words, flags and values of every command; each ends with a known exit code and a word.


_command_CODES = (0, 1, 2, 3)
_command_FLAGS = [f"--{name.replace('_', '-')}" for name in _ENTRIES]
_command_OTHERS = [
    "--recipe",
    "--json",
    "--help",
    "--version",
    "--out",
    "-o",
    "--output",
    "--to",
    "--n-heads",
]
_command_OTHERS += ["--remedies", "--lrs"]
_command_OTHERS += [
    "--seeds",
    "--dry-run",
    "--head-dim",
    "--every-head",
    "--tensors-only",
    "--layout",
]
_command_OTHERS += ["--no-tied", "--", "--executor"]
# Commands that train for as long as their flags say are asked for what they are only.
_command_QUICK = [
    "config",
    "explain",
    "presets",
    "remedies",
    "report",
    "scan",
    "convert",
]


def command_lines() -> SearchStrategy[list[str]]:
    """Words after `qkeel`."""
    value = st.one_of(
        numbers().map(str),
        texts(),
        st.sampled_from(
            [*PRESETS, *REMEDIES, "a.toml", ".", "/dev/null", "/dev/zero", "cpu"]
        ),
    )
    flag = st.one_of(
        st.tuples(st.sampled_from([*_command_FLAGS, *_command_OTHERS]), value),
        st.tuples(
            st.builds(
                "{}={}".format,
                st.sampled_from([*_command_FLAGS, *_command_OTHERS]),
                value,
            )
        ),
        st.tuples(value),
    )
    words = st.lists(flag, max_size=4).map(
        lambda flags: [word for flag in flags for word in flag]
    )
    slow = st.tuples(
        st.sampled_from([c for c in commands() if c not in _command_QUICK]),
        st.sampled_from(["--help", "--steps=x"]),
    )
    return st.one_of(
        st.builds(
            lambda command, rest: [command, *rest],
            st.sampled_from(_command_QUICK),
            words,
        ),
        st.builds(lambda rest: ["config", *rest], words),
        slow.map(lambda pair: [*pair[0].split(), pair[1]]),
        st.builds(
            lambda first, rest: [first, *rest],
            texts().filter(lambda t: t not in commands()),
            words,
        ),
    )


def check_command_lines(words: list[str]) -> None:
    """Runs the line in an empty directory; the page, the recipe or the error is on the right stream."""
    words = [word.replace("\x00", "") for word in words]  # no system passes these on
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        Path("a.toml").write_text("steps = 3\n", encoding="utf-8")
        before = sys.argv
        try:
            sys.argv = ["qkeel", *words]
            code = main(words)
        except QkeelError as error:  # main prints these
            raise AssertionError("an error went past the command line") from error
        finally:
            sys.argv = before
            assert not [name for name in os.listdir(place) if name.endswith(".part")]
    assert code in _command_CODES, code
    assert code in (0, 3) or err.getvalue().strip(), f"exit code {code} without a word"
    assert code == 0 or not out.getvalue().strip() or code == 1, (
        "a refused line prints to stderr alone"
    )
    assert "Traceback" not in err.getvalue()
    (out.getvalue() + err.getvalue()).encode("utf-8")


# Recipes: TOML of any kind as configuration, which config.json keeps.


_recipe_SECTIONS = {
    "data": DataConfig,
    "optim": OptimConfig,
    "model": ModelConfig,
    "images": ImagesConfig,
    "study": None,
}
_recipe_RAW = [
    "[" * 2000,
    "a = " + "[" * 2000,
    "a = " + "9" * 5000,
    "a = 1e999",
    "steps = 2020-01-01",
    "[[data]]",
    "[data]\n[data]",
]
_recipe_RAW += [
    "steps = 1\nsteps = 2",
    "\xff",
    'remedy = """a\nb"""',
    "a.b.c = 1",
    "steps = 0x10",
    "steps = inf",
]
_recipe_RAW += ["steps = nan", "\x00"]


def recipes() -> SearchStrategy[str]:
    """The text of a recipe."""
    value = st.one_of(
        numbers().map(repr),
        texts().map(_recipe_quoted),
        st.sampled_from(["true", "[]", "{}", "2020-01-01", "[1, 'a']", "00:00:00"]),
    )
    top = _recipe_lines(RunConfig, value)
    parts = [
        st.builds(
            "[{}]\n{}".format,
            st.just(name),
            _recipe_lines(cls, value) if cls else _recipe_axes(value),
        )
        for name, cls in _recipe_SECTIONS.items()
    ]
    tables = st.lists(st.one_of(parts), max_size=2).map("\n".join)
    return st.one_of(
        *4 * [st.builds("{}\n{}".format, top, tables)],
        st.sampled_from(_recipe_RAW),
        st.text(max_size=30),
    )


def _recipe_lines(cls: type, hostile: SearchStrategy[str]) -> SearchStrategy[str]:
    """Settings of a table, each once; most have a value that the field has or may have."""
    fields = {
        f.name: f.default
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING
    }
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return chosen.flatmap(
        lambda names: st.tuples(
            *(_recipe_line(name, fields[name], hostile) for name in names)
        )
    ).map("\n".join)


def _recipe_line(
    name: str, default: Any, hostile: SearchStrategy[str]
) -> SearchStrategy[str]:
    if isinstance(default, bool):
        usual = st.sampled_from(["true", "false"])
    elif isinstance(default, float):
        usual = st.sampled_from([repr(default), "0.5", "0.25", "1", "0"])
    elif isinstance(default, int):
        usual = st.sampled_from([str(default), "1", "2", "8", "64"])
    else:
        usual = st.one_of(
            st.just(_recipe_quoted(default or "none")), texts().map(_recipe_quoted)
        )
    return st.one_of(usual, usual, usual, hostile).map(f"{name} = {{}}".format)


def _recipe_axes(value: SearchStrategy[str]) -> SearchStrategy[str]:
    return st.lists(
        st.builds("{} = {}".format, st.sampled_from(["lrs", "seeds"]), value),
        max_size=2,
    ).map("\n".join)


def _recipe_quoted(text: str) -> str:
    escaped = "".join(
        c if c.isalnum() else f"\\U{ord(c):08x}"
        for c in text
        if not 0xD800 <= ord(c) < 0xE000
    )
    return f'"{escaped}"'


def check_recipes(text: str) -> None:
    """Reads the recipe; stored as JSON it is the same configuration."""
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place, "a.toml")
        recipe.write_text(text, encoding="utf-8", errors="replace")
        config, study = configure(SimpleNamespace(), recipe)
        assert isinstance(study, dict)
        assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


CLASSES: dict[str, Hunt] = {
    "spec-strings": Hunt(inputs=spec_strings, check=check_spec_strings),
    "command-lines": Hunt(inputs=command_lines, check=check_command_lines, few=60),
    "recipes": Hunt(inputs=recipes, check=check_recipes),
}
