"""HTML of reports: number formats, tables, figures, and the page that contains everything inline."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qkeel.frames.tables import Markup, join, tag

# Numbers as text and as chart data, which is rounded and thinned by omitting records.

MINUS = "\u2212"


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits, like 25, 11,000, 1.2e5 or NaN, or as a dash for None.

    >>> [number(x, 2) for x in (24.93, 10_832.0, 117_000.0, 0.0312, -3.0, math.nan, None)]
    ['25', '11,000', '1.2e5', '0.031', '−3', 'NaN', '–']
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    rounded = float(f"{abs(value):.{digits - 1}e}")
    sign = MINUS if value < 0 else ""
    if not 1e-4 <= rounded < 1e5:
        mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return (
            f"{sign}{mantissa}e{MINUS if int(exponent) < 0 else ''}{abs(int(exponent))}"
        )
    places = max(0, digits - 1 - math.floor(math.log10(rounded)))
    text = f"{rounded:,.{places}f}"
    return sign + (text.rstrip("0").rstrip(".") if "." in text else text)


def loss(value: float | None) -> str:
    """Formats a loss with three decimals.

    >>> loss(2.82651)
    '2.827'
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.3f}".replace("-", MINUS)


def signed(value: float, places: int = 3) -> str:
    """Formats a difference with its sign.

    >>> [signed(x) for x in (0.0012, -0.0591, 0.0)]
    ['+0.001', '−0.059', '0.000']
    """
    if not math.isfinite(value):
        return number(value)
    rounded = round(value, places)
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else ""
    return f"{sign}{abs(rounded):.{places}f}"


def rate(value: float) -> str:
    """Formats a learning rate in short form.

    >>> [rate(x) for x in (0.1, 0.003, 3e-5, 1.0)]
    ['0.1', '0.003', '3e−5', '1']
    """
    text = f"{value:g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{MINUS if int(exponent) < 0 else ''}{abs(int(exponent))}"


def count(n: int, noun: str) -> str:
    """Formats a count with its noun.

    >>> count(1, "seed"), count(1200, "step")
    ('1 seed', '1,200 steps')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listing(words: Sequence[str]) -> str:
    """Joins words into a phrase, with commas and a conjunction.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    return (
        words[0]
        if len(words) == 1
        else ", ".join(words[:-1]) + " and " + words[-1]
        if words
        else ""
    )


MAX_RECORDS = 300  # per run


def rounded(value: float | None, digits: int = 5) -> float | int | None:
    """Rounds to a few significant digits; returns None for values that JSON cannot represent.

    >>> rounded(3.14159265), rounded(float("nan")), rounded(1e6)
    (3.1416, None, 1000000)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def series(values: np.ndarray, digits: int = 4) -> list[float | int | None]:
    """Converts numbers to JSON values, rounded, with None for missing values."""
    return [rounded(float(value), digits) for value in values]


def thin(heights: Sequence[float | None], limit: int = MAX_RECORDS) -> list[int]:
    """Returns at most `limit` indices: the first, the last, and that of the largest value in each interval between.

    >>> thin([0.0, 1.0, 5.0, 2.0, 1.0, 0.0], limit=4)
    [0, 2, 3, 5]
    """
    if len(heights) <= limit:
        return list(range(len(heights)))
    # The largest value of each interval preserves spikes, which averaging would hide.
    edges = np.linspace(1, len(heights) - 1, limit - 1).astype(int)
    present = [-math.inf if height is None else height for height in heights]
    sortable = [math.inf if math.isnan(height) else height for height in present]
    middle = [
        max(range(a, b), key=sortable.__getitem__)
        for a, b in itertools.pairwise(edges)
        if b > a
    ]
    return [0, *middle, len(heights) - 1]


# Tables of a page, sortable by the numbers in their cells, and data for its scripts.

__all__ = [
    "NOTHING", "Markup", "cell", "columns", "join", "json_script", "measured", "table", "table_row", "tag", "words",
]  # fmt: skip


def json_script(identifier: str, value: object) -> Markup:
    r"""Returns data for the page's scripts, escaped so that strings cannot end the element.

    >>> json_script("d", ["</script>"])
    '<script type="application/json" id="d">["\\u003c/script>"]</script>'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(
        f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>'
    )


def table(
    caption: str,
    head: Sequence[Markup],
    body: Sequence[Markup],
    *,
    sortable: bool = False,
) -> Markup:
    """Returns a table that scrolls within its own frame."""
    inner = tag(
        "table",
        {"class": "sortable"} if sortable else {},
        tag("caption", {"class": "hidden"}, caption),
        tag("thead", {}, tag("tr", {}, *head)),
        tag("tbody", {}, *body),
    )
    return tag(
        "div",
        {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption},
        inner,
    )


def columns(*texts: str, kind: str = "num") -> list[Markup]:
    """Returns column headings, for numbers or, with kind "text", for text."""
    return [tag("th", {"scope": "col", "class": kind}, text) for text in texts]


def table_row(head: str, *cells: Markup) -> Markup:
    """Returns a row with its heading."""
    return tag("tr", {}, tag("th", {"scope": "row"}, head), *cells)


def words(text: str) -> Markup:
    """Returns a text cell."""
    return tag("td", {"class": "text"}, text)


def cell(text: str, key: float, small: str = "", kind: str = "") -> Markup:
    """Returns a number cell, where `key` is the sort key and `small` is shown below the text."""
    sort = "inf" if math.isnan(key) else f"{key:g}"
    attributes = {"class": f"num {kind}".strip(), "data-sort": sort}
    return tag("td", attributes, text, tag("small", {}, small) if small else "")


def measured(value: float, small: str = "") -> Markup:
    """Returns the cell of a measured value, or a dash for NaN, which means not measured."""
    return cell(
        "–" if math.isnan(value) else number(value),
        value,
        "" if math.isnan(value) else small,
    )


NOTHING = cell("–", math.inf)


# The structure of every page: a header with findings, sections, figures and a footer. The file loads nothing else.


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """One part of a page with its heading, which is omitted if it has no content."""

    name: str
    title: str
    content: Markup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The contents of a page.

    lead: the main result, as a sentence or as markup. cautions: what limits it, a sentence each. data: the data that
    the charts draw with the script `drawing` of report/assets, or None for no charts.
    """

    title: str
    sections: Sequence[Section]
    meta: str = ""
    lead: str = ""
    cautions: Sequence[str] = ()
    data: Mapping[str, object] | None = None
    drawing: str = ""
    made: str = "Made by qkeel."

    def html(self, *, refresh: float | None = None) -> str:
        """Returns the HTML; with `refresh`, browsers load the file again after this number of seconds."""
        head = join(
            [
                tag("meta", {"charset": "utf-8"}),
                tag(
                    "meta",
                    {
                        "name": "viewport",
                        "content": "width=device-width, initial-scale=1",
                    },
                ),
                tag(
                    "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}
                ),
                ""
                if refresh is None
                else tag("meta", {"http-equiv": "refresh", "content": f"{refresh:g}"}),
                tag("meta", {"name": "color-scheme", "content": "light dark"}),
                tag("title", {}, f"{self.title} · qkeel"),
                Markup(f"<style>\n{_asset('report.css')}</style>"),
            ]
        )
        scripts = []
        if self.data is not None:
            scripts = [
                json_script("report-data", self.data),
                *map(_script, ("plot.min.js", "kit.js", self.drawing)),
            ]
        scripts.append(_script("page.js"))
        sections = []
        for section in self.sections:
            if section.content:
                title = tag("h2", {}, section.title) if section.title else ""
                names = {"id": f"section-{section.name}", "class": "part"}
                sections.append(tag("section", names, title, section.content))
        needs_script = tag(
            "p", {}, "The charts need JavaScript; the tables are complete without it."
        )
        footer = tag(
            "footer",
            {},
            "" if self.data is None else tag("noscript", {}, needs_script),
            tag("p", {}, f"{self.made} This file loads nothing."),
        )
        body = join([self._header(refresh), tag("main", {}, *sections), footer])
        page = tag("body", {}, "\n", body, "\n", join(scripts), "\n")
        return (
            f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n{page}\n</html>\n'
        )

    def _header(self, refresh: float | None) -> Markup:
        lead = (
            tag("p", {"class": "lead"}, self.lead)
            if self.lead and not isinstance(self.lead, Markup)
            else self.lead
        )
        cautions = [tag("li", {"class": "caution"}, text) for text in self.cautions]
        return tag(
            "header",
            {},
            tag(
                "p",
                {"class": "live"},
                f"The run goes on; this page reloads every {refresh:g} s.",
            )
            if refresh
            else "",
            tag("p", {"class": "brand"}, "qkeel"),
            tag("h1", {}, self.title),
            tag("p", {"class": "meta"}, self.meta) if self.meta else "",
            tag(
                "div",
                {"class": "summary columns" if lead and cautions else "summary"},
                tag("div", {}, lead) if lead else "",
                tag("ul", {"class": "findings"}, *cautions) if cautions else "",
            ),
        )


def empty_note(text: str) -> Markup:
    """Returns the note of a page that has nothing to show."""
    return tag("p", {"class": "empty"}, text)


def note(text: str) -> Markup:
    """Returns a note that explains the content after it."""
    return tag("p", {"class": "note"}, text)


def details(title: str, content: Markup, *, shown: bool = False) -> Markup:
    """Returns content that expands when its title is clicked; with `shown`, it is expanded from the start."""
    return tag(
        "details",
        {"open": None} if shown else {},
        tag("summary", {}, title),
        content,
    )


def facts(
    values_of_name: Mapping[str, str | Sequence[str]], *, code: bool = False
) -> Markup:
    """Returns a list of names, each with a sentence or several values; with `code`, names are formatted as code."""
    lines: list[Markup] = []
    for name, value in values_of_name.items():
        values = (
            [value]
            if isinstance(value, str)
            else [tag("span", {"class": "value"}, text) for text in value]
        )
        lines += [
            tag(
                "dt",
                {},
                tag("code", {}, name) if code else name,
            ),
            tag(
                "dd",
                {},
                join(
                    values,
                    " ",
                ),
            ),
        ]
    return tag("dl", {"class": "facts"}, *lines) if lines else Markup("")


def command_block(text: str, label: str = "Copy") -> Markup:
    """Returns a command with a button that copies it."""
    button = tag("button", {"type": "button", "class": "copy", "hidden": None}, label)
    return join([tag("pre", {"class": "command-text"}, text), button])


def make_again(text: str) -> Markup:
    """Returns the command that reproduces the runs of a page; empty if there is none."""
    block = tag("div", {}, command_block(text))
    return (
        tag("div", {"class": "command"}, tag("h3", {}, "Make it again"), block)
        if text
        else Markup("")
    )


ASSETS = Path(__file__).parent / "assets"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@functools.cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _script(name: str) -> Markup:
    return Markup(f"<script>\n{_asset(name)}</script>")


_SAVE: Mapping[str, str | None] = {
    "type": "button",
    "class": "save",
    "hidden": None,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """One figure. The script finds and draws it by `name`; screen readers read `label`."""

    name: str
    title: str
    caption: str
    label: str

    def figure(self, note: str = "") -> Markup:
        """Returns the figure, empty until the script fills it; `note` follows the caption."""
        saves = [
            tag(
                "button",
                {**_SAVE, "data-save": self.name, "data-kind": kind, "title": title},
                kind.upper(),
            )
            for kind, title in (
                ("svg", "The figure"),
                ("png", "The figure"),
                ("csv", "The numbers of the figure"),
            )
        ]
        title = tag("h3", {"id": f"{self.name}-title"}, self.title)
        frame = {
            "class": "chart",
            "id": f"chart-{self.name}",
            "data-chart": self.name,
            "data-label": self.label,
        }
        return tag(
            "figure",
            {
                "class": "figure",
                "id": self.name,
                "aria-labelledby": f"{self.name}-title",
            },
            tag(
                "div",
                {"class": "figure-head"},
                title,
                tag("div", {"class": "saves"}, *saves),
            ),
            choices(self.name),
            choices(f"{self.name}-view"),
            tag("div", {"class": "legend", "data-legend": self.name}),
            tag("div", frame),
            tag("figcaption", {}, self.caption + note),
        )


def choices(name: str) -> Markup:
    """Returns the container for the choices with that name."""
    return tag("div", {"class": "controls", "data-controls": name})
