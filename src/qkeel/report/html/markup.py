"""HTML by construction: whatever is not already markup is escaped. Tables, whose cells sort by their number."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence

from qkeel.report.html.formats import number


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


VOID = frozenset({"br", "hr", "meta"})


def tag(name: str, attributes: Mapping[str, str | None], *children: str) -> Markup:
    """Returns one element; a child that is not Markup is escaped; an attribute of None is written without a value.

    >>> tag("p", {"class": "note"}, "a < b")
    '<p class="note">a &lt; b</p>'
    """
    head = name + "".join(
        f" {key}" if value is None else f' {key}="{html.escape(value)}"' for key, value in attributes.items()
    )
    if name in VOID:
        return Markup(f"<{head}>")
    return Markup(f"<{head}>{join(children)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Returns parts one after the other, each escaped unless it is Markup."""
    return Markup(between.join(p if isinstance(p, Markup) else html.escape(p) for p in parts))


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
