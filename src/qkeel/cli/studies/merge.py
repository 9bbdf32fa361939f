"""`qkeel merge`: parts of one study, made apart, in one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.cli.console import make_console, print_line
from qkeel.cli.exits import OK
from qkeel.lab.execution.merge_studies import merge_studies
from qkeel.report import write


def merge(
    parts: Annotated[list[Path], Parameter(consume_multiple=True, negative_iterable=())],
    /,
    *,
    out: Path,
) -> int:
    """Merge directories of one study, made apart on several machines, into a new one; they stay as they are.

    If a run appears more than once, the finished, else the most advanced copy is used; two finished copies with
    different results are an error. The study's own command with this directory as --out does what is left.

    Args:
        parts: Directories of the study.
        out: The directory to make; it must be new or empty.
    """
    merged = merge_studies(parts, out)
    write(out, out / "report.html")
    console = make_console()
    console.print(f"{len(merged.table)} runs, {merged.done} done", highlight=False)
    print_line(console, f"report {out / 'report.html'}")
    print_line(console, f"study {out}")
    return OK
