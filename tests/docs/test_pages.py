"""Pages of the docs: links lead somewhere, words are spelled right, sentences are short, and what is next is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from spellchecker import SpellChecker
from tests.docs import page_text
from tests.docs.page_text import DOCS, OUTSIDE, PAGES, ROOT, is_evidence, loaded

TUTORIALS = [page for page in PAGES if page.stem.endswith("-tutorial") or page.parent.name == "how-to"]
WORDS_IN_A_SENTENCE = 20.0  # in the mean, in tutorials and guides
WORDS_ELSEWHERE = 28.0


def _made() -> set[Path]:
    """The pages that a build makes and that others may link to."""
    names = {"commands", "studies", *(path.stem for path in (DOCS / "notebooks").glob("*.ipynb"))}
    return {DOCS / "_made" / f"{name}.md" for name in names}


def test_every_link_and_anchor_leads_somewhere() -> None:
    wrong, made = [], _made()
    for page in [*PAGES, *OUTSIDE]:
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
    assert max(map(len, pages.log_parts())) < 1.5 * pages.PART  # no single entry is longer than a page


def test_words_are_spelled_right() -> None:
    """Words of the project, names and terms of the field are listed in docs/words.txt."""
    speller = SpellChecker()
    speller.word_frequency.load_words((DOCS / "words.txt").read_text(encoding="utf-8").split())
    wrong = []
    for page in [*PAGES, *OUTSIDE]:
        if not is_evidence(page):
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
        links = is_evidence(page) or page.stem in {"index", "glossary", "nouns", "recipes", "security"}
        assert links or "glossary" in text, f"{page.name} does not link its terms to the glossary"


def test_the_glossary_has_each_term_once_in_order_and_all_that_pages_name() -> None:
    found: list[str] = []
    for section in (DOCS / "glossary.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        terms = [term.lower() for term in re.findall(r"^([^\n:][^\n]*)\n: ", section, flags=re.M)]
        assert terms == sorted(terms, key=lambda term: term.replace("τ", "tau").replace("µ", "mu"))
        found += [part.strip() for term in terms for part in re.sub(r" \(.*?\)|, of a site", "", term).split(",")]
    assert len({*found}) == len(found)
    for page in PAGES:
        for named in re.findall(r"Terms used here: (.*?) \(\[glossary", page.read_text(encoding="utf-8"), flags=re.S):
            terms = re.sub(r"\s*\(.*?\)", "", " ".join(named.lower().split())).split(", ")
            assert {*terms} <= {*found}, page.name


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
