"""Every `qkeel …` line in the README and the docs is a command the program knows."""

import functools
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from tests.docs.page_text import PAGES as PAGES_OF_SITE
from tests.each_row import each_row

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "experiments" / "recipes" / "README.md"]
PAGES += [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if {"_made", "_build"}.isdisjoint(page.parts)
]  # notes are history


def _commands():
    found = []
    for page in PAGES:
        for block in re.findall(
            r"```(?:sh|console|bash)\n(.*?)```", page.read_text(), flags=re.S
        ):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.split("#| > ", line)[0].strip().removeprefix("$ ").strip()
                if text.startswith("qkeel "):
                    found.append((page.name, text))
    return found


def test_the_docs_show_commands():
    assert any(page == "README.md" for page, _ in _commands())


@each_row("page, line", _commands())
def test_each_command_line_parses(page, line):
    words = shlex.split(line)[1:]
    _app(tuple(words[:2])).parse_args(words, exit_on_error=False, print_error=False)


@functools.cache
def _app(words):
    from qkeel.cli.app import make_app

    return make_app(words)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = [line.strip() for line in index.split("```{toctree}", 1)[1].splitlines()]
    for page in PAGES_OF_SITE:
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        assert (
            name == "index"
            or name.startswith("reference/")
            or any(fnmatch(name, pattern) for pattern in listed)
        ), name
