"""The page of a precision study: the thresholds, predicted and seen, and every size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qkeel.report.html.formats import listing, number, rounded
from qkeel.report.html.markup import Markup, columns, join, measured, table, tag, words
from qkeel.report.html.page import Chart, Finding, Page, Section, details, facts, make_again, note

Row = Mapping[str, float | str]
ERROR = Chart(
    "error",
    "Error of logits against their size",
    "Each line is a format and a kernel: solid as computed, dashed as predicted from norms alone. The red "
    "line is the tolerance. A line ends where numbers overflow.",
    "Line chart: error of logits against the largest logit, one line per format and kernel.",
)
_WORDS = {
    "data": "Logits",
    "logit": "Seen in logits",
    "output": "Seen in the output",
    "overflow": "Overflows at",
    "max_logit": "Largest logit",
    "logit_error": "Logit error, nats",
    "predicted_error": "… predicted",
    "output_error": "Output error",
    "flipped": "Top key flipped",
}


def precision_page(
    rows: Sequence[Row], thresholds: Sequence[Row], tolerance: float, made: Mapping[str, str], command: str
) -> str:
    """Returns the text of the page.

    Args:
        rows: every size, by lab.studies.precision.
        thresholds: where each format fails, by the same.
        tolerance: of logits in nats, and of the output as a share of its length.
        made: when, where and by which versions.
        command: what makes it again.
    """
    what = (
        "Spread: independent logits whose standard deviation grows. Shifted: logits of standard deviation 1 around a "
        "mean that grows, which does not change softmax but is rounded. Fused kernels read q, k and v in the format; "
        "eager ones also store the scores in it. Nothing is trained. A number is the largest logit at which rounding "
        f"first moves logits by {number(tolerance)} nats (root mean square), or the output by "
        f"{number(100 * tolerance)} % of its length; a dash: at no size that was tried."
    )
    harmed = [row for row in thresholds if any(isinstance(v, float) and math.isfinite(v) for v in row.values())]
    left = len(thresholds) - len(harmed)
    safe = f" {left} of {len(thresholds)} settings, within all of this at every size, are left out." if left else ""
    return Page(
        title="Where low precision loses attention",
        findings=_answer(thresholds, tolerance),
        sections=[
            Section("charts", "Charts", ERROR.figure()),
            Section("thresholds", "Thresholds", join([note(what + safe), _table("Thresholds", harmed)])),
            Section("sizes", "Every size", details(f"{len(rows):,} measurements", _table("Every size", rows))),
            Section("provenance", "Provenance", join([facts(made), make_again(command)])),
        ],
        data=_data(rows, tolerance),
        drawing="precision.js",
    ).html()


def _answer(thresholds: Sequence[Row], tolerance: float) -> list[Finding]:
    """From which logit on a format is too coarse, without a remedy and with each."""
    found = [row for row in thresholds if row["data"] == "spread"]
    parts = [
        f"{row['format']} from a largest logit of {number(seen, 2)} on ({row['kernel']})"
        for row in found
        if row["remedy"] == "none" and math.isfinite(seen := _float(row["logit"]))
    ]
    if not parts:
        return [Finding("lead", f"Without a remedy no format moves logits by {number(tolerance)} nats at these sizes.")]
    lead = f"Rounding moves the logits of attention by {number(tolerance)} nats in {listing(parts)}."
    held = [r for r in dict.fromkeys(str(row["remedy"]) for row in found) if r != "none"]
    safe = [r for r in held if not any(math.isfinite(_float(row["logit"])) for row in found if row["remedy"] == r)]
    over = [row for row in found if row["remedy"] == "none" and math.isfinite(_float(row["overflow"]))]
    ends = [f"{row['format']} ({row['kernel']}) from {number(_float(row['overflow']), 2)} on" for row in over]
    texts = [f"It never does with {listing(safe)}: their logits stay small." if safe else ""]
    texts.append(f"Numbers overflow in {listing(ends)}." if ends else "")
    return [Finding("lead", lead), *(Finding("note", text) for text in texts if text)]


def _float(value: float | str) -> float:
    return value if isinstance(value, float) else math.nan


def _data(rows: Sequence[Row], tolerance: float) -> dict[str, object]:
    names = ("data", "remedy", "format", "kernel")
    numbers = ("max_logit", "logit_error", "predicted_error", "output_error")
    points = [{n: row[n] for n in names} | {n: rounded(_float(row[n])) for n in numbers} for row in rows]
    return {"rows": points, "tolerance": tolerance}


def _table(title: str, rows: Sequence[Row]) -> Markup:
    head = _columns(rows[0]) if rows else []
    body = [tag("tr", {}, *(words(v) if isinstance(v, str) else measured(v) for v in row.values())) for row in rows]
    return table(title, head, body, sortable=True)


def _columns(row: Row) -> list[Markup]:
    return [
        heading
        for name, value in row.items()
        for heading in columns(_WORDS.get(name, name.capitalize()), kind="text" if isinstance(value, str) else "num")
    ]
