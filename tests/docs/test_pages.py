"""Pages of the docs: every link and anchor leads somewhere, and notebooks hold what they print."""

import json
import re

import pytest
from tests.docs import page_text
from tests.docs.page_text import DOCS, OFF_SITE, OUTSIDE, PAGES, ROOT, loaded


def _made():
    """The pages that a build makes and that others may link to."""
    names = {"commands"}
    return {DOCS / "_made" / f"{name}.md" for name in names}


def test_every_link_and_anchor_leads_somewhere():
    wrong, made = [], _made()
    for page in [*PAGES, *OFF_SITE, *OUTSIDE]:
        for target in page_text.links(page):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            place = (page.parent / path).resolve() if path else page
            if place in made:
                continue
            if not place.exists() or (
                anchor
                and place.suffix == ".md"
                and anchor not in page_text.slugs(place)
            ):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    for path in sorted(
        (DOCS / "notebooks").glob("*.ipynb")
    ):  # their links are those of a page in docs/
        targets = re.findall(r"\]\(([^)#\s]+)\)", page_text.notebook_text(path))
        wrong += [
            f"{path.name}: {target}"
            for target in targets
            if not (DOCS / target).exists()
        ]
    assert not wrong, "\n".join(wrong)


def test_what_made_pages_link_to_exists():
    pages = loaded("made_pages")
    for name, text in pages.NEXT.items():
        assert (DOCS / f"{name}.md").exists(), name
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert (DOCS / target).exists(), f"{name}: {target}"


def _text(notebook):
    """What each cell put out, with numbers left out: their last digits depend on the processor."""
    found = []
    for cell in notebook["cells"]:
        outputs = [
            output.get("text") or output["data"]["text/plain"]
            for output in cell.get("outputs", ())
        ]
        found.append(
            [re.sub(r"[ ]*\d[\d,.e+-]*", "#", "".join(output)) for output in outputs]
        )
    return found


def test_notebooks_hold_their_output():
    paths = sorted((DOCS / "notebooks").glob("*.ipynb"))
    assert len(paths) == 2
    for path in paths:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert all(
            cell["cell_type"] == "markdown" or cell["outputs"] for cell in cells
        ), path.name


@pytest.mark.slow  # 11 s: shapes and types of every call are checked
def test_notebooks_put_out_what_they_hold():
    runner = loaded("run_notebooks")
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert _text(runner.executed(path)) == _text(kept), (
            f"run python docs/run_notebooks.py: {path.name}"
        )
