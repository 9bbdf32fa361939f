"""`qkeel figures`: the figures of a study or a watched run as files for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.report.figures import WIDTH
from qkeel.report.figures import figures as draw

Format = Literal["pdf", "svg", "png"]
_DEFAULT: list[Format] = ["pdf", "svg"]


def figures(
    run: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    formats: Annotated[list[Format], Parameter(consume_multiple=True, negative_iterable=())] = _DEFAULT,
    width: float = WIDTH,
    baseline: str = "none",
) -> int:
    """Write the figures of a study or a watched run for a paper, as PDF, SVG or PNG.

    They are drawn by matplotlib, which `pip install "qkeel[plot]"` installs; the same numbers make the same files.

    Args:
        run: Directory of a study, of a run, or of a watched model.
        out: The folder to write to [default: NAME-figures].
        formats: pdf, svg, png, or several of them.
        width: Width of a figure in inches; a column of a two-column page is 3.3.
        baseline: Of a study, the remedy that gains are over, like qk_norm.
    """
    for path in draw(
        run, out or Path(f"{run.resolve().name}-figures"), formats=formats, width=width, baseline=baseline
    ):
        print(path)
    return OK
