"""Every Python block of the README and the docs runs."""

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "docs",
    "docs/tutorials",
    "docs/guides",
    "docs/internals",
    "experiments/notes",
)
PAGES = [
    ROOT / "README.md",
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))),
]
READER = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"])


def has_python(page):
    text = page.read_text(encoding="utf-8")
    return "```python" in text or "block: python" in text


@pytest.mark.filterwarnings(
    "ignore"
)  # the frameworks that pages show warn of what is theirs to change
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem) for page in PAGES if has_python(page)]
)
def test_the_blocks_of_a_page_run_one_after_the_other(page):
    examples = list(READER.parse(page).examples())
    assert examples
    for example in examples:
        example.evaluate()
