"""The command line in the process of a test."""

from __future__ import annotations

import runpy

import pytest


def qkeel(*words: object) -> int:
    """`qkeel words…`; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["qkeel", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("qkeel", run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code
