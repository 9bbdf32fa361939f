"""Pages of the docs: links lead somewhere, words are spelled right, sentences are short, and what is next is said."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spellchecker import SpellChecker
from tests.docs import page_text
from tests.docs.page_text import DOCS, OFF_SITE, OUTSIDE, PAGES, ROOT, is_made, loaded

WORDS_ON_THE_SITE = 45_000


def _made() -> set[Path]:
    """The pages that a build makes and that others may link to."""
    names = {"commands"}
    return {DOCS / "_made" / f"{name}.md" for name in names}


def test_every_link_and_anchor_leads_somewhere() -> None:
    wrong, made = [], _made()
    for page in [*PAGES, *OFF_SITE, *OUTSIDE]:
        for target in page_text.links(page):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            place = (page.parent / path).resolve() if path else page
            if place in made:
                continue
            if not place.exists() or (anchor and place.suffix == ".md" and anchor not in page_text.slugs(place)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):  # their links are those of a page in docs/
        targets = re.findall(r"\]\(([^)#\s]+)\)", page_text.notebook_text(path))
        wrong += [f"{path.name}: {target}" for target in targets if not (DOCS / target).exists()]
    assert not wrong, "\n".join(wrong)


def test_what_made_pages_link_to_exists() -> None:
    pages = loaded("made_pages")
    for name, text in pages.NEXT.items():
        assert (DOCS / f"{name}.md").exists(), name
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert (DOCS / target).exists(), f"{name}: {target}"


def test_words_are_spelled_right() -> None:
    """Words of the project, names and terms of the field are listed in docs/words.txt."""
    speller = SpellChecker()
    speller.word_frequency.load_words((DOCS / "words.txt").read_text(encoding="utf-8").split())
    wrong = []
    for page in [*PAGES, *OUTSIDE]:
        if not is_made(page):
            bad = speller.unknown(page_text.words(page))
            bad = {word for word in bad if not (word.endswith("'s") and word[:-2] in speller)}
            wrong += [f"{page.relative_to(ROOT)}: {' '.join(sorted(bad))}"] if bad else []
    assert not wrong, "\n".join(wrong)


def test_each_page_says_what_to_do_next_and_names_its_sources() -> None:
    pages = loaded("made_pages")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert "**Next:**" in pages.changed(name, text), f"{page.name} does not say what to do next"
        assert not re.search(r"\bsource \d{3}\b", text), f"{page.name}: author, title and year, not a number"


def test_the_glossary_has_each_term_once_in_order_and_tooltips_read_it() -> None:
    section = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2]
    terms = [term.lower() for term in re.findall(r"^([^\n:][^\n]*)\n: ", section, flags=re.M)]
    assert terms == sorted(terms, key=lambda term: term.replace("τ", "tau"))
    assert len({*terms}) == len(terms) > 40
    assert len(loaded("made_pages").terms()) >= len(terms)


def test_the_site_is_short() -> None:
    """Without code, tables' marks and what docstrings make."""
    assert sum(len(re.findall(r"[^\W_][\w'’.-]*", page_text.text(page))) for page in PAGES) <= WORDS_ON_THE_SITE


def dialect() -> list[tuple[re.Pattern[str], str]]:
    """The words of docs/dialect.txt that native readers stumble over, and what to write instead."""
    lines = (DOCS / "dialect.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.partition(" -> ") for line in lines if line and not line.startswith("#")]
    return [(re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.I), better) for pattern, _, better in rows]


def test_pages_have_no_words_of_the_dialect() -> None:
    wrong = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        text = re.sub(page_text.NO_WORDS, " ", page_text.text(page))
        for pattern, better in dialect():
            for found in pattern.finditer(text):
                around = " ".join(text[max(0, found.start() - 40) : found.end() + 30].split())
                wrong.append(f"{page.relative_to(ROOT)}: “{found[0]}” in “{around}”; {better}")
    assert not wrong, "\n".join(wrong)


def test_the_help_of_commands_has_no_words_of_the_dialect() -> None:
    text = loaded("made_pages").command_pages()["commands"]
    wrong = [f"“{found[0]}”; {better}" for pattern, better in dialect() for found in pattern.finditer(text)]
    assert not wrong, "\n".join(wrong)


def _strings(source: str) -> Iterator[str]:
    """The docstrings and messages of a module, without code in backticks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield re.sub(r"`[^`\n]*`", " ", node.value)


def test_docstrings_and_messages_have_no_words_of_the_dialect() -> None:
    wrong, rules = [], dialect()
    for module in sorted((ROOT / "src").rglob("*.py")):
        for text in _strings(module.read_text(encoding="utf-8")):
            for pattern, better in rules:
                for found in pattern.finditer(text):
                    around = " ".join(text[max(0, found.start() - 40) : found.end() + 30].split())
                    wrong.append(f"{module.relative_to(ROOT)}: “{found[0]}” in “{around}”; {better}")
    assert not wrong, "\n".join(wrong)


def test_the_list_of_the_dialect_finds_what_it_names() -> None:
    found = {pattern.search(text) is not None for pattern, _ in dialect() for text in ["a run goes on as it stands"]}
    assert found == {True, False}


def _text(notebook: dict[str, Any]) -> list[list[str]]:
    """What each cell put out, with numbers left out: their last digits depend on the processor."""
    found = []
    for cell in notebook["cells"]:
        outputs = [output.get("text") or output["data"]["text/plain"] for output in cell.get("outputs", ())]
        found.append([re.sub(r"[ ]*\d[\d,.e+-]*", "#", "".join(output)) for output in outputs])
    return found


def test_notebooks_hold_their_output() -> None:
    paths = sorted((DOCS / "notebooks").glob("*.ipynb"))
    assert len(paths) == 2
    for path in paths:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert all(cell["cell_type"] == "markdown" or cell["outputs"] for cell in cells), path.name


@pytest.mark.slow  # 11 s: shapes and types of every call are checked
def test_notebooks_put_out_what_they_hold() -> None:
    runner = loaded("run_notebooks")
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert _text(runner.executed(path)) == _text(kept), f"{path.name}: `make notebooks` writes what it puts out now"
