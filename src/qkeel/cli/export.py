"""`qkeel export`: the records of a run as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.errors import RunDirectoryError
from qkeel.frames import Frame, TableFiles
from qkeel.monitor.record.loaded_run import load
from qkeel.records import disk


def export(
    run: Path,
    /,
    *,
    to: Literal["csv", "parquet"],
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
) -> int:
    """Write the records of a run as tables, CSV or Parquet.

    The files are steps, with one row per record, heads, with one row per record, layer and head, and eval_steps and
    eval_heads of passes in evaluation mode. The run stays as it is.

    Args:
        run: Directory of a run or of a watched model.
        to: The format: csv, or parquet, which needs pyarrow.
        out: The folder to write; it must not exist, or be empty [default: NAME-tables].
    """
    loaded = load(run)
    frames: dict[str, Frame] = {
        "steps": loaded.steps,
        "heads": loaded.heads,
        "eval_steps": loaded.eval_steps,
        "eval_heads": loaded.eval_heads,
    }
    place = out or Path(f"{run.resolve().name}-tables")
    files = TableFiles(place, to)
    if not disk.make_directory(place) and any(place.iterdir()):
        raise RunDirectoryError(f"expected a new or empty folder to write tables to, but {place} holds something")
    for name, frame in frames.items():
        if len(frame):
            files.append(name, frame)
    for path in files.close():
        print(path)
    return OK
