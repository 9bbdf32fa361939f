"""`qkeel presets`, `qkeel remedies`, `qkeel explain NAME`: what names stand for, printed without waiting for torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from qkeel.cli.exits import OK

# Written beforehand by tests/cli/answers.py, which a test compares: to make it imports torch, which takes seconds.
ANSWERS = Path(__file__).with_name("answers.json")


def list_presets() -> int:
    """List the published attention recipes."""
    return _print(answers()["presets"])


def list_remedies() -> int:
    """List the remedies."""
    return _print(answers()["remedies"])


def explain_command(name: str, /) -> int:
    """Print the formula of a preset or a remedy, and its source.

    Args:
        name: A preset or remedy with options, like gemma2:cap=30 or lalr:tau=0.1.
    """
    known = answers()["explained"].get(name)
    if known is None:  # one with options, several, or none
        from qkeel.cli.explain import explain

        known = explain(name)
    print(known)
    return OK


def answers() -> Mapping[str, Mapping[str, str]]:
    """Presets and remedies with their lines, and what `explain` says of each."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def _print(names: Mapping[str, str]) -> int:
    width = max(map(len, names))
    for name, line in names.items():
        print(f"{name:<{width}}  {line}")
    return OK
