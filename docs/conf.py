"""Sphinx: furo, MyST, and the reference from docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
import made_pages

project = "qkeel"
author = "The qkeel developers"
copyright = "the qkeel developers, Apache-2.0"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.autosummary",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
html_math_renderer = (
    "mathml"  # browsers draw it themselves; MathJax would come from another host
)
html_theme = "furo"
html_title = "qkeel"
html_split_index = True  # one page of every name is longer than 200 kB
html_domain_indices = False  # of all modules only one would be listed
html_static_path = ["_static"]
html_search_scorer = str(Path(__file__).parent / "_static" / "search_order.js")
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"  # the theme's own underlines the names of modules, as if they were links
templates_path = ["_templates"]
exclude_patterns = [
    "_build",
    "_templates",
    "notebooks",
    # How a number gets to the alarm is for every reader; the other pages are for maintainers.
    *(
        f"internals/{page.name}"
        for page in (Path(__file__).parent / "internals").glob("*.md")
        if page.stem != "numbers"
    ),
    "_made/*-fields.md",
    "_made/table-columns.md",
]

# Plain words need no tooltip.
PLAIN = {
    "alarm",
    "form",
    "gain",
    "kept",
    "record",
    "role",
    "run",
    "sample",
    "bound",
    "policy",
    "layout",
    "study",
}
PLAIN |= {"threshold", "missed"}
TERMS = {term: text for term, text in made_pages.terms().items() if term not in PLAIN}

smartquotes_action = "qe"  # -- is the beginning of an option, not a dash
default_role = "code"  # one backtick in docstrings, as in Markdown
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # the name of a default, not the words of its value
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autosummary_generate = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False  # shapes in annotations are markup to Sphinx


def pruned(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Called with each page after the theme: in the sidebar, groups are closed but the reader's own."""
    context["furo_navigation_tree"] = made_pages.pruned(
        context.get("furo_navigation_tree", "")
    )
    context["body"] = made_pages.stackable(
        made_pages.breakable(context.get("body", ""))
    )


def untyped(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Called before napoleon, which takes the words before a colon in the text of an attribute for its type."""
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # a comment without words comes first


def escaped(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Lets |i - j|, z* and query_ in a docstring stand as they are: to Sphinx their signs are markup, as in *this*."""
    lines += made_pages.sourced(obj) + (
        made_pages.inherited(obj) if isinstance(obj, type) else []
    )
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            text = re.sub(
                r"(?<=[\w,] )\.{2,3}(?= )", "…", line
            )  # a summary would end at its dots
            lines[i] = re.sub(
                r"(`[^`]*`|(?<![\w*])\*[a-z]+\*(?![\w*]))|(\||\*|(?<=\w)_(?!\w))",
                lambda m: m[1] or "\\" + m[2],
                text,
            )


def read(app: Any, name: str, source: list[str]) -> None:
    """Called with the text of each page."""
    source[0] = made_pages.changed(name, source[0])


def tooltips(app: Any, doctree: nodes.document, page: str) -> None:
    """Called with each page when its links are known: the first use of a glossary term shows its definition."""
    if page in ("index", "metrics") or page.startswith(
        ("reference/", "_made/", "genindex")
    ):
        return
    pattern = re.compile(
        r"(?<![\w-])(?<!Kendall’s )("
        + "|".join(sorted(map(re.escape, TERMS), key=len, reverse=True))
        + r")(?![\w-])"
    )
    seen: set[str] = set()
    for text in list(doctree.findall(nodes.Text)):
        inside = text.parent
        if not isinstance(
            inside, (nodes.paragraph, nodes.emphasis, nodes.strong)
        ) or _linked(inside):
            continue
        parts: list[nodes.Node] = []
        rest = str(text)
        while (
            found := next((m for m in pattern.finditer(rest) if m[1] not in seen), None)
        ) is not None:
            seen.add(found[1])
            parts += [
                nodes.Text(rest[: found.start()]),
                nodes.abbreviation(found[1], found[1], explanation=TERMS[found[1]]),
            ]
            rest = rest[found.end() :]
        if parts:
            inside.replace(text, [*parts, nodes.Text(rest)])


def _linked(node: nodes.Node | None) -> bool:
    """Whether a node is part of a link, a heading or a caption."""
    while node is not None:
        if isinstance(node, (nodes.reference, nodes.title, nodes.caption, nodes.term)):
            return True
        node = node.parent
    return False


def formula(writer: Any, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula as MathML, which needs neither a network nor a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    writer.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def finished(app: Any, error: Exception | None) -> None:
    """Takes the index on one page away: its parts by letter hold the same."""
    (Path(app.outdir) / "genindex-all.html").unlink(missing_ok=True)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    made_pages.write_pages()
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("autodoc-process-docstring", untyped, priority=400)
    app.connect("autodoc-process-docstring", escaped)
    app.connect("source-read", read)
    app.connect("doctree-resolved", tooltips)
    app.connect("html-page-context", pruned, priority=900)
    app.connect("build-finished", finished)
