"""Command lines of `qkeel`: words, flags and values of every command; each ends with a known exit code and a word."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import numbers, texts
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import scratch

from qkeel.cli.app import main
from qkeel.cli.commands import commands
from qkeel.cli.run import _ENTRIES
from qkeel.errors import QkeelError
from qkeel.remedies.apply import REMEDIES
from qkeel.spec import PRESETS

_CODES = (0, 1, 2, 3)
_FLAGS = [f"--{name.replace('_', '-')}" for name in _ENTRIES]
_OTHERS = [
    "--recipe",
    "--json",
    "--help",
    "--version",
    "--out",
    "-o",
    "--output",
    "--to",
    "--n-heads",
    "--remedies",
    "--lrs",
]
_OTHERS += [
    "--seeds",
    "--dry-run",
    "--head-dim",
    "--every-head",
    "--tensors-only",
    "--layout",
    "--no-tied",
    "--",
    "--shard",
]
# Commands that train for as long as their flags say are asked for what they are only.
_QUICK = ["config", "explain", "presets", "remedies", "report", "scan", "convert"]


def inputs() -> SearchStrategy[list[str]]:
    """Words after `qkeel`."""
    value = st.one_of(
        numbers().map(str),
        texts(),
        st.sampled_from([*PRESETS, *REMEDIES, "a.toml", ".", "/dev/null", "/dev/zero", "cpu"]),
    )
    flag = st.one_of(
        st.tuples(st.sampled_from([*_FLAGS, *_OTHERS]), value),
        st.tuples(st.builds("{}={}".format, st.sampled_from([*_FLAGS, *_OTHERS]), value)),
        st.tuples(value),
    )
    words = st.lists(flag, max_size=4).map(lambda flags: [word for flag in flags for word in flag])
    slow = st.tuples(
        st.sampled_from([c for c in commands() if c not in _QUICK]), st.sampled_from(["--help", "--steps=x"])
    )
    return st.one_of(
        st.builds(lambda command, rest: [command, *rest], st.sampled_from(_QUICK), words),
        st.builds(lambda rest: ["config", *rest], words),
        slow.map(lambda pair: [*pair[0].split(), pair[1]]),
        st.builds(lambda first, rest: [first, *rest], texts().filter(lambda t: t not in commands()), words),
    )


def check(words: list[str]) -> None:
    """Runs the line in an empty directory; the page, the recipe or the error is on the right stream."""
    words = [word.replace("\x00", "") for word in words]  # no system passes these on
    out, err = io.StringIO(), io.StringIO()
    with scratch() as place, contextlib.chdir(place), _streams(out, err):
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
    assert code in _CODES, code
    assert code in (0, 3) or err.getvalue().strip(), f"exit code {code} without a word"
    assert code == 0 or not out.getvalue().strip() or code == 1, "a refused line prints to stderr alone"
    assert "Traceback" not in err.getvalue()
    (out.getvalue() + err.getvalue()).encode("utf-8")


@contextlib.contextmanager
def _streams(out: io.StringIO, err: io.StringIO):
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


HUNT = Hunt(inputs=inputs, check=check, few=60)
