"""docs/foreign.md."""

from __future__ import annotations

from typing import Any


def page(targets: list[Any], results: list[dict[str, Any]]) -> str:
    """The page."""
    return ""
