"""`qkeel study precision`: where low precision loses attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.errors import InvalidValueError

_SEVERAL = Parameter(consume_multiple=True, negative_iterable=(), show_default=False)


def study_precision(
    *,
    out: Path = Path("runs/precision"),
    remedies: Annotated[list[str] | None, _SEVERAL] = None,
    head_dim: int = 64,
    seed: int = 0,
) -> int:
    """The same attention in float64, fp32, bf16, fp16 and with q and k in fp8, over logits of growing size.

    Trains nothing; takes seconds. Writes table.csv (every size) and report.html (the thresholds, foretold and seen).

    Args:
        out: Directory of the study.
        remedies: Of none, qk_norm, cosine and softcap:cap=50 [default: all].
        head_dim: Dimensions of a head.
        seed: Of the random q, k and v.
    """
    from qkeel.cli.console import make_console
    from qkeel.lab.studies import precision
    from qkeel.lab.table import write_table
    from qkeel.records import write_text
    from qkeel.report.precision import precision_page

    if head_dim < 2:
        raise InvalidValueError(f"expected a head_dim of at least 2, got {head_dim}")
    shape = precision.Shape(head_dim=head_dim)
    table = list(precision.rows(shape, remedies=remedies or tuple(precision.REMEDIES), seed=seed))
    out.mkdir(parents=True, exist_ok=True)
    write_table(out, table, precision.COLUMNS)
    lines = precision.thresholds(table)
    write_text(out / "report.html", precision_page(table, lines, precision.TOLERANCE))
    console = make_console()
    text = f"largest logit at which rounding moves logits by {precision.TOLERANCE:g} nats (– where it never does):"
    console.print(text, highlight=False)
    console.print(_table(lines))
    console.print(f"report {out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    return OK


def _table(lines: list[dict[str, float | str]]) -> Any:
    from rich.table import Table

    from qkeel.report.formats import number

    found = Table(*(name.replace("_", " ") for name in lines[0]))
    for line in lines:
        cells = (v if isinstance(v, str) else "–" if v != v else number(v) for v in line.values())
        found.add_row(*cells)
    return found
