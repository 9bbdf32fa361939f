"""`qkeel study precision`: where low precision loses attention."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.cli.console import make_console, numbers, print_line
from qkeel.cli.exits import OK, command_line
from qkeel.errors import InvalidValueError
from qkeel.lab.config import RunConfig
from qkeel.lab.execution.results_table import write_table
from qkeel.lab.studies import precision
from qkeel.lab.training.environment import computed_with
from qkeel.records import write_text
from qkeel.records.disk import make_directory
from qkeel.records.made_on import made_on
from qkeel.report.precision_page import precision_page

_SEVERAL = Parameter(consume_multiple=True, negative_iterable=(), show_default=False)


def study_precision(
    *,
    out: Path = Path("runs/precision"),
    remedies: Annotated[list[str] | None, _SEVERAL] = None,
    head_dim: int = 64,
    seed: int = 0,
) -> int:
    """The same attention in float64, fp32, bf16, fp16 and with q and k in fp8, over logits of growing size.

    Trains nothing; takes seconds. Writes table.csv (every size) and report.html (the thresholds, predicted and seen).

    Args:
        out: Directory of the study.
        remedies: Of none, qk_norm, cosine and softcap:cap=50 [default: all].
        head_dim: Dimensions of a head.
        seed: Seed for the random q, k and v.
    """
    if head_dim < 2:
        raise InvalidValueError(f"expected a head_dim of at least 2, got {head_dim}; give a larger one")
    shape = precision.Shape(head_dim=head_dim)
    make_directory(out)
    table = list(precision.rows(shape, remedies=remedies or tuple(precision.REMEDIES), seed=seed))
    write_table(out, table, precision.COLUMNS)
    lines = precision.thresholds(table)
    versions = computed_with(RunConfig(device="cpu"))
    made = {
        "Made": time.strftime("%Y-%m-%d %H:%M"),
        "qkeel": versions["qkeel"],
        "torch": versions["torch"],
        "Python": platform.python_version(),
        "Processor": versions["cpu"],
        **{name.capitalize(): value for name, value in made_on().items()},
    }
    write_text(out / "report.html", precision_page(table, lines, precision.TOLERANCE, made, command_line()))
    console = make_console()
    text = f"largest logit at which rounding moves logits by {precision.TOLERANCE:g} nats (– where it never does):"
    console.print(text, highlight=False)
    console.print(numbers(lines))
    print_line(console, f"report {out / 'report.html'}")
    return OK
