"""The tables of a page, whose cells sort by their number, and data for its scripts."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence

from qkeel.frames.markup import Markup, join, tag
from qkeel.report.html.formats import number

__all__ = [
    "NOTHING", "Markup", "cell", "columns", "join", "json_script", "measured", "table", "table_row", "tag", "words",
]  # fmt: skip


def json_script(identifier: str, value: object) -> Markup:
    """Returns data for the page's scripts; no text inside can end the element.

    >>> json_script("d", ["</script>"])
    '<script type="application/json" id="d">["\\\\u003c/script>"]</script>'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


def table(caption: str, head: Sequence[Markup], body: Sequence[Markup], *, sortable: bool = False) -> Markup:
    """Returns a table that scrolls inside its own frame."""
    inner = tag(
        "table",
        {"class": "sortable"} if sortable else {},
        tag("caption", {"class": "hidden"}, caption),
        tag("thead", {}, tag("tr", {}, *head)),
        tag("tbody", {}, *body),
    )
    return tag("div", {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption}, inner)


def columns(*texts: str, kind: str = "num") -> list[Markup]:
    """Returns the headings of columns: of numbers, or with kind "text" of words."""
    return [tag("th", {"scope": "col", "class": kind}, text) for text in texts]


def table_row(head: str, *cells: Markup) -> Markup:
    """Returns a row under its heading."""
    return tag("tr", {}, tag("th", {"scope": "row"}, head), *cells)


def words(text: str) -> Markup:
    """Returns a cell of words."""
    return tag("td", {"class": "text"}, text)


def cell(text: str, key: float, small: str = "", kind: str = "") -> Markup:
    """Returns a cell of a number: `key` is what it is sorted by, `small` is written below it."""
    sort = "inf" if math.isnan(key) else f"{key:g}"
    attributes = {"class": f"num {kind}".strip(), "data-sort": sort}
    return tag("td", attributes, text, tag("small", {}, small) if small else "")


def measured(value: float, small: str = "") -> Markup:
    """Returns the cell of a measured number; a dash for NaN: not measured."""
    return cell("–" if math.isnan(value) else number(value), value, "" if math.isnan(value) else small)


NOTHING = cell("–", math.inf)
