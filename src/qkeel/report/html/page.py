"""The skeleton of every page: header with its findings, sections, figures, footer; one file that loads nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qkeel.report.html.formats import count
from qkeel.report.html.markup import Markup, join, json_script, tag


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of the first screen. `kind`: lead (what to remember), note, caution (what limits it), or undecided:
    shown when asked for."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """One part of a page under its heading; left out where it has no content."""

    name: str
    title: str
    content: Markup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that a page says.

    `data` is what its charts draw with the script `drawing` of report/assets; None: it has no charts. `mark` sets names
    in findings apart. `verdict` comes before the findings, as markup of its own. `in_place`: a live page replaces its
    sections one by one, all but the charts; else as a whole.
    """

    title: str
    sections: Sequence[Section]
    meta: str = ""
    verdict: Markup | None = None
    findings: Sequence[Finding] = ()
    data: Mapping[str, object] | None = None
    drawing: str = ""
    mark: Callable[[str], str] = str
    made: str = "Made by qkeel."
    in_place: bool = False

    def html(self, *, live: str = "") -> str:
        """Returns the text of the page; `live`: its state, if a server keeps it up to date, see report.live."""
        head = join(
            [
                tag("meta", {"charset": "utf-8"}),
                tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
                tag("meta", {"http-equiv": "Content-Security-Policy", "content": LIVE_POLICY if live else POLICY}),
                tag("meta", {"name": "color-scheme", "content": "light dark"}),
                tag("title", {}, f"{self.title} · qkeel"),
                Markup(f"<style>\n{_asset('report.css')}</style>"),
            ]
        )
        scripts = []
        if self.data is not None:
            scripts = [json_script("report-data", self.data), *map(_script, ("plot.min.js", "kit.js", self.drawing))]
        scripts += [_script("page.js"), *([_script("live.js")] if live else [])]
        main = tag("main", {}, *(self._section(section) for section in self.sections if section.content))
        body = join([self._header(), main, self._footer()])
        page = tag("body", {"data-state": live} if live else {}, "\n", body, "\n", join(scripts), "\n")
        return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n{page}\n</html>\n'

    def _header(self) -> Markup:
        leads = [tag("p", {"class": "lead"}, self.mark(f.text)) for f in self.findings if f.kind == "lead"]
        rest = [f for f in self.findings if f.kind not in ("lead", "undecided")]
        folded = [f for f in self.findings if f.kind == "undecided"]
        leads = [self.verdict, *leads] if self.verdict else leads
        both = " columns" if leads and rest else ""
        return tag(
            "header",
            {"data-live": "header"} if self.in_place else {},
            tag("p", {"class": "brand"}, "qkeel"),
            tag("h1", {}, self.title),
            tag("p", {"class": "meta"}, self.meta) if self.meta else "",
            tag(
                "div",
                {"class": f"summary{both}"},
                tag("div", {}, *leads) if leads else "",
                finding_list(rest, self.mark),
            ),
            details(f"{count(len(folded), 'claim')} not shown", finding_list(folded, self.mark)) if folded else "",
        )

    def _section(self, section: Section) -> Markup:
        live = {"data-live": section.name} if self.in_place and section.name != "charts" else {}
        title = tag("h2", {}, section.title) if section.title else ""
        return tag("section", {"id": f"section-{section.name}", "class": "part", **live}, title, section.content)

    def _footer(self) -> Markup:
        script = tag("p", {}, "The charts need JavaScript; the tables are complete without it.")
        charts = tag("noscript", {}, script) if self.data is not None else ""
        return tag("footer", {}, charts, tag("p", {}, f"{self.made} This file loads nothing."))


def finding_list(findings: Sequence[Finding], mark: Callable[[str], str] = str) -> Markup:
    """Returns findings as a list; empty without any."""
    items = [tag("li", {"class": finding.kind}, mark(finding.text)) for finding in findings]
    return tag("ul", {"class": "findings"}, *items) if items else Markup("")


def empty_note(text: str) -> Markup:
    """Returns the note of a page that has nothing to show."""
    return tag("p", {"class": "empty"}, text)


def note(text: str) -> Markup:
    """Returns a note that says how to read what follows it."""
    return tag("p", {"class": "note"}, text)


def details(title: str, content: Markup, *, shown: bool = False) -> Markup:
    """Returns content that is shown when its title is pressed, or from the start."""
    return tag("details", {"open": None} if shown else {}, tag("summary", {}, title), content)


def facts(found: Mapping[str, str | Sequence[str]], *, code: bool = False) -> Markup:
    """Returns a list of names, each with a sentence or with several values; empty without any. `code`: field names."""
    lines: list[Markup] = []
    for name, value in found.items():
        values = [value] if isinstance(value, str) else [tag("span", {"class": "value"}, one) for one in value]
        lines += [tag("dt", {}, tag("code", {}, name) if code else name), tag("dd", {}, join(values, " "))]
    return tag("dl", {"class": "facts"}, *lines) if lines else Markup("")


def command_block(text: str, label: str = "Copy") -> Markup:
    """Returns a command with a button that copies it."""
    button = tag("button", {"type": "button", "class": "copy", "hidden": None}, label)
    return join([tag("pre", {"class": "command-text"}, text), button])


def make_again(text: str) -> Markup:
    """Returns the command that makes the runs of a page; empty without one."""
    block = tag("div", {}, command_block(text))
    return tag("div", {"class": "command"}, tag("h3", {}, "Make it again"), block) if text else Markup("")


ASSETS = Path(__file__).parents[1] / "assets"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"  # a live page asks the server it came from, and nobody else


@functools.cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _script(name: str) -> Markup:
    return Markup(f"<script>\n{_asset(name)}</script>")


_SAVE: Mapping[str, str | None] = {"type": "button", "class": "save", "hidden": None}


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """One figure. `name` is what the script draws it by; `label` is read to those who cannot see it."""

    name: str
    title: str
    caption: str
    label: str

    def figure(self, note: str = "") -> Markup:
        """Returns the figure, empty until the script fills it; `note` follows the caption."""
        saves = [
            tag("button", {**_SAVE, "data-save": self.name, "data-kind": kind, "title": title}, kind.upper())
            for kind, title in (("svg", "The figure"), ("png", "The figure"), ("csv", "The numbers of the figure"))
        ]
        title = tag("h3", {"id": f"{self.name}-title"}, self.title)
        frame = {"class": "chart", "id": f"chart-{self.name}", "data-chart": self.name, "data-label": self.label}
        return tag(
            "figure",
            {"class": "figure", "id": self.name, "aria-labelledby": f"{self.name}-title"},
            tag("div", {"class": "figure-head"}, title, tag("div", {"class": "saves"}, *saves)),
            choices(self.name),
            choices(f"{self.name}-view"),
            tag("div", {"class": "legend", "data-legend": self.name}),
            tag("div", frame),
            tag("figcaption", {}, self.caption + note),
        )


def choices(name: str) -> Markup:
    """Returns the place of the choices of that name."""
    return tag("div", {"class": "controls", "data-controls": name})
