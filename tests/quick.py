"""A parameter's values of which `make test` takes some, and `make slow` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """All values, those that `keep` does not hold for marked as slow."""
    return [
        value if keep(value) else pytest.param(*value if type(value) is tuple else (value,), marks=pytest.mark.slow)
        for value in values
    ]
