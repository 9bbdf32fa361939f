"""`qkeel presets` and `qkeel remedies`: names, each with its line."""

from __future__ import annotations

from collections.abc import Mapping

from qkeel.cli.exits import OK
from qkeel.remedies.apply import remedies
from qkeel.spec import presets


def list_presets() -> int:
    """List the published attention recipes."""
    return _print(presets())


def list_remedies() -> int:
    """List the remedies."""
    return _print(remedies())


def _print(names: Mapping[str, str]) -> int:
    width = max(map(len, names))
    for name, line in names.items():
        print(f"{name:<{width}}  {line}")
    return OK
