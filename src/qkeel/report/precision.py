"""The page of a precision study: the thresholds, foretold and seen, and every size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qkeel.report.formats import number
from qkeel.report.markup import Markup, join, tag
from qkeel.report.shell import document
from qkeel.report.tables import cell, column, table

Row = Mapping[str, float | str]
_WORDS = {
    "data": "Logits",
    "remedy": "Remedy",
    "format": "Format",
    "kernel": "Kernel",
    "predicted": "Foretold",
    "logit": "Seen in logits",
    "output": "Seen in the output",
    "overflow": "Overflows at",
    "size": "Size",
    "max_logit": "Largest logit",
    "logit_error": "Logit error, nats",
    "predicted_error": "… foretold",
    "output_error": "Output error",
    "flipped": "Top key flipped",
}


def precision_page(rows: Sequence[Row], thresholds: Sequence[Row], tolerance: float) -> str:
    """The text of the page; rows and thresholds by lab.studies.precision."""
    title = "Where low precision loses attention"
    lead = (
        f"Largest logit at which rounding moves logits by {number(tolerance)} nats, root mean square, or the output by "
        f"{number(100 * tolerance)} % of its length. A dash: not at any size tried."
    )
    what = (
        "Spread: independent logits whose standard deviation grows. Shifted: logits of standard deviation 1 around a "
        "mean that grows, which softmax does not see and rounding does. Fused kernels read q, k and v in the format; "
        "eager ones also store the scores in it. Nothing is trained."
    )
    header = tag(
        "header",
        {},
        tag("p", {"class": "brand"}, "qkeel"),
        tag("h1", {}, title),
        tag("div", {"class": "summary"}, tag("p", {"class": "lead"}, lead), tag("p", {}, what)),
    )
    limits = _section("thresholds", "Thresholds", _table("Thresholds", thresholds))
    every = tag("details", {}, tag("summary", {}, f"{len(rows):,} measurements"), _table("Every size", rows))
    body = join([header, tag("main", {}, limits, _section("sizes", "Every size", every))])
    return document(title, body)


def _section(name: str, title: str, content: Markup) -> Markup:
    return tag("section", {"id": f"section-{name}", "class": "part"}, tag("h2", {}, title), content)


def _table(title: str, rows: Sequence[Row]) -> Markup:
    names = list(rows[0]) if rows else []
    head = [column(_WORDS.get(n, n), "text" if isinstance(rows[0][n], str) else "number") for n in names]
    return table(title, head, [tag("tr", {}, *(_cell(row[name]) for name in names)) for row in rows], sortable=True)


def _cell(value: float | str) -> Markup:
    if isinstance(value, str):
        return tag("td", {"class": "text"}, value)
    return cell("–" if math.isnan(value) else number(value), value)
