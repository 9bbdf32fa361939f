"""The pages of the docs as text: without code, tables apart, sentence by sentence."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "experiments/recipes/README.md",
    )
]
PAGES = sorted(
    page
    for page in DOCS.rglob("*.md")
    if not {"_made", "_build", "internals"} & set(page.parts)
)  # of the site
OFF_SITE = sorted(
    page
    for folder in ("docs/internals", "experiments/notes")
    for page in (ROOT / folder).rglob("*.md")
)


def loaded(name):
    """A program that lies with the pages."""
    place = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def text(page):
    """A page without code blocks, comments and directives."""
    kept = page.read_text(encoding="utf-8")
    kept = re.sub(r"<!--.*?-->", "", kept, flags=re.S)
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1`*\s*$", "", kept, flags=re.S | re.M)


def slugs(page):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found = {}
    for heading in re.findall(r"^#+ +(.+?)\s*$", text(page), flags=re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return {f"{slug}-{i}" if i else slug for slug, n in found.items() for i in range(n)}


def links(page):
    """The targets of links and pictures on a page."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text(page)))


def notebook_text(path):
    """The prose of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )
