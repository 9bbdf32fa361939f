"""Code and pages speak the field's words: predicted, known, visible, besides, a replaced call."""

from __future__ import annotations

import re
from pathlib import Path

from . import limits
from .source import MODULES, ROOT, listed

# Words of the old dialect and what stands there now.
DIALECT = {
    r"foret(?:old|ell|ells|elling)": "predicted, predict",
    r"(?:un)?told": "known, unknown, reported",
    r"beside": "besides, next to",
    r"anew|afresh": "again, from scratch",
    r"strewn?": "spread, inserted",
    r"twins?": "copy, counterpart, stacked module",
    r"lest|whoever|thereby": "a whole sentence that says it",
    r"seams?": "replaced call",
    r"carriers?": "operator that passes scores on",
    r"stand[ _-]?ins?|stand(?:s|ing)?[ _]in": "replacement",
    r"doors?": "entry point, or the function's name",
    r"hands on|at hand": "passes on, there",
    r"who sees whom|way of the logit|whose logits may be known": "visibility, logit path",
    r"source 0\d\d": "the paper",
}
# Pages with names of their own: the notebook, and those in which an outcome is called "told" (see the glossary).
RECORDS = ("LOG.md", "foreign.md", "trust.md", "multimodal.md", "glossary.md")
# Words that are fine in a sentence and say nothing as the name of a module, class or function.
NAMES = re.compile(r"(?:^|_)(?:moved|together|joint|aside)(?:_|$)", re.IGNORECASE)


def test_the_old_dialect_is_gone() -> None:
    found = []
    files = [path for path, _ in MODULES.values()] + [path for path in _pages() if path.name not in RECORDS]
    for pattern, instead in DIALECT.items():
        # Names in snake case and camel case hold words too.
        word = re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![a-z])", re.IGNORECASE)
        for path in files:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                found += [f"{path.relative_to(ROOT)}:{number} {m.group()} ({instead})" for m in word.finditer(line)]
    listed(found, limits.DIALECT)


def _pages() -> list[Path]:
    """Everything that is written for readers: pages, recipes and their README."""
    folders = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").iterdir(), *ROOT.glob("*.md")]
    made = {"_made", "_build"}  # written from others when the site is built
    return [path for path in folders if path.suffix in (".md", ".toml") and not made & set(path.parts)]


def test_a_module_class_or_function_is_named_for_what_it_is() -> None:
    from .source import all_functions

    stems = [name for name in MODULES if NAMES.search(name.rpartition(".")[2])]
    listed(stems + [name for name in all_functions() if NAMES.search(name.rpartition(".")[2])], limits.VAGUE_NAMES)
