"""HTML of reports: number formats, tables, figures, and the page that contains everything inline."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import lzma
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from qkeel.frames.tables import Markup, markup

__all__ = ["Markup", "markup"]

# Numbers as text and as chart data, which is rounded and thinned by omitting records.

MINUS = "\u2212"


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits, like 25, 11,000, 1.2e5 or NaN, or as a dash for None.

    >>> [number(x, 2) for x in (24.93, 10_832.0, 117_000.0, 0.0312, -3.0, math.nan, None)]
    ['25', '11,000', '1.2e5', '0.031', '−3', 'NaN', '–']
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: f"{MINUS}∞"}.get(value, "NaN")
    # -0.0 is written as 0.
    short = float(f"{value:.{digits}g}") or 0.0
    if short == 0 or 1e-4 <= abs(short) < 1e5:
        return f"{short:,}".removesuffix(".0").replace("-", MINUS)
    return _short_exponent(f"{value:.{digits}g}")


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
    short = round(value, places) or 0.0
    return f"{short:{'+' if short else ''}.{places}f}".replace("-", MINUS)


def rate(value: float) -> str:
    """Formats a learning rate in short form.

    >>> [rate(x) for x in (0.1, 0.003, 3e-5, 1.0)]
    ['0.1', '0.003', '3e−5', '1']
    """
    return _short_exponent(f"{value:g}")


def _short_exponent(text: str) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", text).replace("-", MINUS)


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
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# Per run.
MAX_RECORDS = 300


def rounded(value: float | None, digits: int = 5) -> float | int | None:
    """Rounds to a few significant digits; returns None for values that JSON cannot represent.

    >>> rounded(3.14159265), rounded(float("nan")), rounded(1e6)
    (3.1416, None, 1000000)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    # Without ".0" the page is shorter; a very large float is shorter with its exponent.
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def series(values: np.ndarray, digits: int = 4) -> list[float | int | None]:
    """Converts numbers to JSON values, rounded, with None for missing values."""
    return [rounded(float(value), digits) for value in values]


def thin(heights: Sequence[float | None], limit: int = MAX_RECORDS) -> list[int]:
    """Returns at most `limit` indices: the first, the last, and that of the largest value in each interval between.

    NaN counts as larger than any number, and a missing value as smaller.

    >>> thin([0.0, 1.0, 5.0, 2.0, 1.0, 0.0], limit=4)
    [0, 2, 3, 5]
    """
    if len(heights) <= limit:
        return list(range(len(heights)))
    levels = np.array([-math.inf if x is None else x for x in heights])
    levels[np.isnan(levels)] = math.inf
    # `limit` - 1 edges bound `limit` - 2 intervals, as the first and the last record stay in any case.
    edges = np.linspace(1, len(heights) - 1, limit - 1).astype(int).tolist()
    # The largest value of each interval preserves spikes, which averaging would hide.
    peaks = [a + int(levels[a:b].argmax()) for a, b in itertools.pairwise(edges)]
    return [0, *peaks, len(heights) - 1]


# Tables of a page, sortable by the numbers in their cells.


def table(caption: str, head: Iterable[Markup], rows: Iterable[Markup]) -> Markup:
    """Returns a sortable table that scrolls within its own frame."""
    return markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{0}"><table class="sortable">'
        '<caption class="hidden">{0}</caption><thead><tr>{1}</tr></thead><tbody>{2}</tbody></table></div>',
        caption,
        head,
        rows,
    )


def columns(*texts: str, kind: str = "num") -> list[Markup]:
    """Returns column headings, for numbers or, with kind "text", for text."""
    return [markup('<th scope="col" class="{}">{}</th>', kind, text) for text in texts]


def table_row(head: str, *cells: Markup) -> Markup:
    """Returns a row with its heading."""
    return markup('<tr><th scope="row">{}</th>{}</tr>', head, cells)


def words(text: str) -> Markup:
    """Returns a text cell."""
    return markup('<td class="text">{}</td>', text)


def cell(text: str, key: float, small: str = "", kind: str = "") -> Markup:
    """Returns a number cell, where `key` is the sort key and `small` is shown below the text."""
    # The page sorts by this number, and NaN would have no place in the order.
    sort = "inf" if math.isnan(key) else f"{key:g}"
    below = markup("<small>{}</small>", small) if small else ""
    classes = f"num {kind}".strip()
    return markup('<td class="{}" data-sort="{}">{}{}</td>', classes, sort, text, below)


def measured(value: float, small: str = "") -> Markup:
    """Returns the cell of a measured value, or a dash for NaN, which means not measured."""
    return NOTHING if math.isnan(value) else cell(number(value), value, small)


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
        lead = self.lead
        if lead and not isinstance(lead, Markup):
            lead = markup('<p class="lead">{}</p>', lead)
        cautions = [markup('<li class="caution">{}</li>', x) for x in self.cautions]
        reload, live, scripts, noscript = "", "", [], ""
        if refresh is not None:
            reload = markup('<meta http-equiv="refresh" content="{}">', f"{refresh:g}")
            live = markup(
                '<p class="live">The run goes on; this page reloads every {} s.</p>',
                f"{refresh:g}",
            )
        if self.data is not None:
            names = (_LIBRARY, "kit.js", self.drawing)
            scripts = [json_script("report-data", self.data), *map(_script, names)]
            noscript = Markup(
                "<noscript><p>The charts need JavaScript; the tables are complete without it.</p></noscript>"
            )
        return markup(
            _PAGE,
            policy=POLICY,
            reload=reload,
            title=self.title,
            style=Markup(_asset("report.css")),
            live=live,
            meta=markup('<p class="meta">{}</p>', self.meta) if self.meta else "",
            summary="summary columns" if lead and cautions else "summary",
            lead=markup("<div>{}</div>", lead) if lead else "",
            findings=markup('<ul class="findings">{}</ul>', cautions)
            if cautions
            else "",
            sections=map(_section, self.sections),
            noscript=noscript,
            made=self.made,
            scripts=[*scripts, _script("page.js")],
        )


_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\
<meta http-equiv="Content-Security-Policy" content="{policy}">{reload}<meta name="color-scheme" content="light dark">\
<title>{title} · qkeel</title><style>
{style}</style></head>
<body>
<header>{live}<p class="brand">qkeel</p><h1>{title}</h1>{meta}<div class="{summary}">{lead}{findings}</div></header>\
<main>{sections}</main><footer>{noscript}<p>{made} This file loads nothing.</p></footer>
{scripts}
</body>
</html>
"""


def _section(section: Section) -> Markup:
    if not section.content:
        return Markup("")
    title = markup("<h2>{}</h2>", section.title) if section.title else ""
    return markup(
        '<section id="section-{}" class="part">{}{}</section>',
        section.name,
        title,
        section.content,
    )


def json_script(identifier: str, value: object) -> Markup:
    r"""Returns data for the page's scripts, escaped so that strings cannot end the element.

    >>> json_script("d", ["</script>"])
    '<script type="application/json" id="d">["\\u003c/script>"]</script>'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    # A string that contains "</script>" would end the element.
    text = text.replace("<", "\\u003c")
    return markup(
        '<script type="application/json" id="{}">{}</script>', identifier, Markup(text)
    )


def note(text: str) -> Markup:
    """Returns a note that explains the content after it."""
    return markup('<p class="note">{}</p>', text)


def details(title: str, content: Markup) -> Markup:
    """Returns content that expands when its title is clicked."""
    return markup("<details><summary>{}</summary>{}</details>", title, content)


def facts(values_of_name: Mapping[str, Sequence[str]]) -> Markup:
    """Returns a list of names, each with its values."""
    lines = []
    for name, values in values_of_name.items():
        spans = [markup('<span class="value">{}</span> ', text) for text in values]
        lines.append(markup("<dt>{}</dt><dd>{}</dd>", name, spans))
    return markup('<dl class="facts">{}</dl>', lines) if lines else Markup("")


def command_block(text: str, label: str = "Copy") -> Markup:
    """Returns a command with a button that copies it."""
    return markup(
        '<pre class="command-text">{}</pre><button type="button" class="copy" hidden>{}</button>',
        text,
        label,
    )


ASSETS = Path(__file__).parent / "assets"
# Compressed, or it would be a tenth of the source distribution.
_LIBRARY = "plot.min.js.xz"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@functools.cache
def _asset(name: str) -> str:
    stored = (ASSETS / name).read_bytes()
    if name.endswith(".xz"):
        stored = lzma.decompress(stored)
    return stored.decode("utf-8")


def _script(name: str) -> Markup:
    return markup("<script>\n{}</script>", Markup(_asset(name)))


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
            markup(_SAVE, self.name, kind, title, kind.upper())
            for kind, title in (
                ("svg", "The figure"),
                ("png", "The figure"),
                ("csv", "The numbers of the figure"),
            )
        ]
        return markup(
            '<figure class="figure" id="{name}" aria-labelledby="{name}-title"><div class="figure-head">'
            '<h3 id="{name}-title">{title}</h3><div class="saves">{saves}</div></div>'
            '<div class="controls" data-controls="{name}"></div>'
            '<div class="controls" data-controls="{name}-view"></div>'
            '<div class="legend" data-legend="{name}"></div>'
            '<div class="chart" id="chart-{name}" data-chart="{name}" data-label="{label}"></div>'
            "<figcaption>{caption}{note}</figcaption></figure>",
            name=self.name,
            title=self.title,
            saves=saves,
            label=self.label,
            caption=self.caption,
            note=note,
        )


_SAVE = (
    '<button type="button" class="save" hidden data-save="{}" data-kind="{}" title="{}">'
    "{}</button>"
)


def choices(name: str) -> Markup:
    """Returns the container for the choices with that name."""
    return markup('<div class="controls" data-controls="{}"></div>', name)
