"""`qkeel report`: one HTML page about studies, runs or watched models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.report import write


def report(
    runs: Annotated[list[Path], Parameter(consume_multiple=True, negative_iterable=())],
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("report.html"),
    baseline: str = "none",
) -> int:
    """Write one self-contained HTML page about studies, runs or watched models.

    Args:
        runs: Directories of studies, of runs, or of watched models.
        output: The file to write.
        baseline: Of a study, the remedy that the others are compared with, like qk_norm.
    """
    write(runs, output, baseline=baseline)
    print(output)
    return OK
