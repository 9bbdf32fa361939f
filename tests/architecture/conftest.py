"""The package's syntax trees go after the last rule: code that searches all objects would pass 600,000 of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import source


@pytest.fixture(scope="package", autouse=True)
def _dropped_trees() -> Iterator[None]:
    yield
    source.MODULES.parsed.clear()
    source.all_functions.cache_clear()
    source.walk.cache_clear()
