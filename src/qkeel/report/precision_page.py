"""The page of a precision study: the thresholds, predicted and seen, and every size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkeel.report.html.formats import number
from qkeel.report.html.markup import Markup, columns, join, measured, table, tag, words
from qkeel.report.html.page import Finding, Page, Section, details, note

Row = Mapping[str, float | str]
_WORDS = {
    "data": "Logits",
    "remedy": "Remedy",
    "format": "Format",
    "kernel": "Kernel",
    "predicted": "Predicted",
    "logit": "Seen in logits",
    "output": "Seen in the output",
    "overflow": "Overflows at",
    "size": "Size",
    "max_logit": "Largest logit",
    "logit_error": "Logit error, nats",
    "predicted_error": "… predicted",
    "output_error": "Output error",
    "flipped": "Top key flipped",
}


def precision_page(rows: Sequence[Row], thresholds: Sequence[Row], tolerance: float) -> str:
    """Returns the text of the page; rows and thresholds by lab.studies.precision, `tolerance` in nats."""
    lead = (
        f"The largest logit at which rounding moves logits by {number(tolerance)} nats (root mean square), or the "
        f"output by {number(100 * tolerance)} % of its length. A dash: at no size that was tried."
    )
    what = (
        "Spread: independent logits whose standard deviation grows. Shifted: logits of standard deviation 1 around a "
        "mean that grows, which does not change softmax but is rounded. Fused kernels read q, k and v in the format; "
        "eager ones also store the scores in it. Nothing is trained."
    )
    every = details(f"{len(rows):,} measurements", _table("Every size", rows))
    return Page(
        title="Where low precision loses attention",
        findings=[Finding("lead", lead)],
        sections=[
            Section("thresholds", "Thresholds", join([note(what), _table("Thresholds", thresholds)])),
            Section("sizes", "Every size", every),
        ],
    ).html()


def _table(title: str, rows: Sequence[Row]) -> Markup:
    head = _columns(rows[0]) if rows else []
    body = [tag("tr", {}, *(words(v) if isinstance(v, str) else measured(v) for v in row.values())) for row in rows]
    return table(title, head, body, sortable=True)


def _columns(row: Row) -> list[Markup]:
    return [
        heading
        for name, value in row.items()
        for heading in columns(_WORDS.get(name, name), kind="text" if isinstance(value, str) else "num")
    ]
