"""What the rules of build.py do not get right, per model type."""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {}
