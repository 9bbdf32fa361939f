"""HTML by construction: whatever is not already markup is escaped. For pages, and for what a notebook shows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping


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


def plain_table(head: Iterable[str], rows: Iterable[Iterable[str]], *, aligned: bool = False) -> Markup:
    """Returns a table for a notebook, without a style of the page's own.

    >>> plain_table(["a"], [["<"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;</td></tr></table>'

    Args:
        head: the headings; none for a table without.
        rows: the texts of the cells.
        aligned: the first column to the left, the others, which are numbers, to the right.
    """

    def line(kind: str, cells: Iterable[str]) -> Markup:
        sides = ({"style": f"text-align:{'right' if i else 'left'}"} if aligned else {} for i, _ in enumerate(cells))
        return tag("tr", {}, *(tag(kind, side, text) for side, text in zip(sides, cells)))

    head, rows = list(head), map(list, rows)
    style = {"style": "font-variant-numeric:tabular-nums"} if aligned else {}
    return tag("table", style, *([line("th", head)] if head else []), *(line("td", row) for row in rows))
