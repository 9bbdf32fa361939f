"""JSON files of results, and the commit that made them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

NOT_FINITE = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
}  # as qkeel.lab writes them into JSON


def read_json(path: Path) -> Any:
    """Reads a JSON file; the strings 'nan', 'inf' and '-inf' become numbers again."""
    return with_numbers(json.loads(path.read_text(encoding="utf-8")))


def with_numbers(value: Any) -> Any:
    """Returns a value of a JSON file whose strings 'nan', 'inf' and '-inf' are numbers.

    >>> with_numbers({"loss": ["inf", 1.0]})
    {'loss': [inf, 1.0]}
    """
    if isinstance(value, dict):
        return {name: with_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [with_numbers(entry) for entry in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def commit() -> str:
    """Returns the first digits of the checked-out commit, or "" outside of a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
