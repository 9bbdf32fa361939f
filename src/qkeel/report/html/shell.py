"""The document around every page: head, style, data, scripts; one file that loads nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from qkeel.report.html.markup import Markup, join, json_script, tag

ASSETS = Path(__file__).parents[1] / "assets"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"  # a live page asks the server it came from, and nobody else


def document(
    title: str, body: Markup, data: Mapping[str, object] | None, drawings: Sequence[str], *, live: str = ""
) -> str:
    """Returns the text of a page.

    Args:
        title: of the window.
        body: everything that is seen.
        data: what the charts draw; None for a page without charts.
        drawings: the scripts of `assets` that draw, after the chart library.
        live: the state of the page if a server keeps it up to date, see report.live.
    """
    head = join(
        [
            tag("meta", {"charset": "utf-8"}),
            tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            tag("meta", {"http-equiv": "Content-Security-Policy", "content": LIVE_POLICY if live else POLICY}),
            tag("meta", {"name": "color-scheme", "content": "light dark"}),
            tag("title", {}, f"{title} · qkeel"),
            Markup(f"<style>\n{_asset('report.css')}</style>"),
        ]
    )
    scripts = []
    if data is not None:
        scripts = [json_script("report-data", data), *map(_script, ("plot.min.js", "kit.js", *drawings))]
    scripts += [_script("page.js"), *([_script("live.js")] if live else [])]
    page = tag("body", {"data-state": live} if live else {}, "\n", body, "\n", join(scripts), "\n")
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n{page}\n</html>\n'


@functools.cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _script(name: str) -> Markup:
    return Markup(f"<script>\n{_asset(name)}</script>")
