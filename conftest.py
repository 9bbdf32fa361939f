"""Every Python block of the README and the docs is a test."""

import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

FOLDERS = ("docs", "docs/tutorials", "docs/guides", "docs/internals", "experiments/notes")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["README.md", *(f"{folder}/*.md" for folder in FOLDERS)]
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The frameworks of others warn of what is theirs to change."""
    for item in items:
        if item.path.name == "watch.md":
            item.add_marker(pytest.mark.filterwarnings("ignore"))
