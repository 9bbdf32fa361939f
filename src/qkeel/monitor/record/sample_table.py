"""A sample for people: one line, a table for a terminal, a table for a notebook. No library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkeel.frames.markup import plain_table, tag
from qkeel.monitor.alarms.rule import Alarm, Severity
from qkeel.monitor.record.sample import Sample
from qkeel.records import CLASS_FIELDS, HEAD_FIELDS
from qkeel.sites.named_models import site_label

_ORDER = {Severity.CRITICAL: 0, Severity.ALARM: 1, Severity.NOTICE: 2}


def leading_head(sample: Sample) -> tuple[str, int, float] | None:
    """The layer and head with the largest logit, and that logit; None if none was measured."""
    logits = sample.heads.get("max_logit")
    if logits is None or np.isnan(logits).all():
        return None
    layer, head = np.unravel_index(int(np.nanargmax(logits)), logits.shape)
    return sample.layers[layer], int(head), float(logits[layer, head])


def sample_line(sample: Sample, root: str = "") -> str:
    """One line: step, loss, the largest logit and its head, entropy, norms; what was not measured is left out.

    >>> sample_line(Sample(step=5, values={"max_logit": 3.0}))
    'step 5, max logit 3'
    """
    parts = [f"step {sample.step:,}" + (" (eval)" if sample.phase == "eval" else "")]
    loss = sample.values.get("train_loss", math.nan)
    if not math.isnan(loss):
        parts.append(f"loss {loss:.4f}")
    lead = leading_head(sample)
    if lead is not None:
        parts.append(f"max logit {_number(lead[2])} ({f'{site_label(lead[0], root)} head {lead[1]}'.strip()})")
    for name, word in [*_columns().items()][1 if lead is not None else 0 : 4]:
        value = sample.overall(name)
        if not math.isnan(value):
            parts.append(f"{word} {_number(value)}")
    return ", ".join(parts)


def coverage(watched: int, missed: Sequence[str]) -> str:
    """A line that says how much of a model's attention is watched; "" where all of it is.

    >>> coverage(4, ["odd: its scores …"])
    '4 of 5 attentions watched; not understood: odd: its scores …'
    """
    others = "; ".join(missed)
    return f"{watched} of {watched + len(missed)} attentions watched; not understood: {others}" if missed else ""


def sample_table(sample: Sample, alarms: Sequence[Alarm] = (), note: str = "", *, root: str = "") -> str:
    """Lists the layers, one a line: largest logit and the head that has it, entropy, norms; then the gravest alarms.

    Logits and entropy are in nats. A number that was not measured has no column.

    Args:
        sample: the step's numbers.
        alarms: alarms of the run so far; the gravest are printed below the table.
        note: a sentence between the table and the alarms.
        root: the name of attention that is the whole model.

    >>> print(sample_table(Sample(step=5, values={"max_logit": 3.0})))
    step 5, max logit 3
    """
    head, rows = _rows(sample, root)
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    body = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in (head, *rows)]
    return "\n".join(
        [sample_line(sample, root), *(body if rows else []), *filter(None, [note]), *map(str, _gravest(alarms))]
    )


def sample_html(sample: Sample, alarms: Sequence[Alarm] = (), note: str = "", *, root: str = "") -> str:
    """Writes the same table as HTML for a notebook's `_repr_html_`, with every text escaped and no script.

    Args:
        sample: the step's numbers.
        alarms: alarms of the run so far; the gravest are listed below the table.
        note: a sentence between the table and the alarms.
        root: the name of attention that is the whole model.

    >>> sample_html(Sample(step=5))
    '<div><p>step 5</p></div>'
    """
    head, rows = _rows(sample, root)
    table = [plain_table(head, rows, aligned=True)] if rows else []
    warned = [tag("li", {}, str(alarm)) for alarm in _gravest(alarms)]
    listed = [*([tag("p", {}, note)] if note else []), *([tag("ul", {}, *warned)] if warned else [])]
    return tag("div", {}, tag("p", {}, sample_line(sample, root)), *table, *listed)


def _columns() -> dict[str, str]:
    """The headings of the fields that the table shows."""
    return {name: field.column for name, field in {**HEAD_FIELDS, **CLASS_FIELDS}.items() if field.column}


def _rows(sample: Sample, root: str) -> tuple[list[str], list[list[str]]]:
    columns = _columns()
    shown = [name for name in columns if name in sample.heads and not np.isnan(sample.heads[name]).all()]
    folded = {name: sample.by_layer(name) for name in shown}
    head = ["layer"]
    for name in shown:
        head += [columns[name], "head"] if name == "max_logit" else [columns[name]]
    rows = []
    for i, layer in enumerate(sample.layers if shown else ()):
        row = [site_label(layer, root)]
        for name in shown:
            row.append(_number(float(folded[name][i])))
            if name == "max_logit":
                logits = sample.heads[name][i]
                row.append("-" if np.isnan(logits).all() else str(int(np.nanargmax(logits))))
        rows.append(row)
    return head, rows


def _gravest(alarms: Sequence[Alarm], most: int = 5) -> list[Alarm]:
    return sorted(alarms, key=lambda alarm: (_ORDER[alarm.severity], alarm.step))[:most]


def _number(value: float) -> str:
    """A number of at most three digits, or with thousands separators.

    >>> _number(14.23), _number(2213.4), _number(0.0312), _number(float("nan"))
    ('14.2', '2,213', '0.0312', '-')
    """
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
