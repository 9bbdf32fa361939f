"""The table.csv of a study, one row per run in the order of its grid: the same bytes for the same results."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from qkeel import metrics
from qkeel.lab.config import RunConfig
from qkeel.options import Json
from qkeel.records import STEP_FIELDS, TABLE_COLUMNS, RunDirectory, RunStatus, write_text


def rows(out: Path, entries: Sequence[Json]) -> list[Json]:
    """One dict per run by `columns`; a run without result has only its name and status."""
    table = [_row(RunDirectory(out / "runs" / entry["run_id"]), entry) for entry in entries]
    names = columns(table)
    return [{name: row.get(name) for name in names} for row in table]


def columns(table: Iterable[Json]) -> list[str]:
    """Returns records.TABLE_COLUMNS, then what the task of some run adds to them."""
    return list(dict.fromkeys([*TABLE_COLUMNS, *(name for row in table for name in row)]))


def _row(directory: RunDirectory, entry: Json) -> Json:
    blank = dict.fromkeys(TABLE_COLUMNS)
    named = {name: entry[name] for name in ("remedy", "lr", "seed", "run_id")}
    status = directory.status
    results = directory.summary() if status is RunStatus.DONE else {}
    more = {"mix": entry["role"]} if any("/" in name for name in results) else {}
    more |= {"part": entry["part"]} if entry.get("part") else {}
    more |= {"primary": entry["primary"]} if "primary" in entry else {}
    return {**blank, **more, **results, **named, "status": str(status)}


def write_table(out: Path, table: Sequence[Json], names: Sequence[str] = ()) -> None:
    """Writes table.csv atomically, by default with all columns of the table. Floats have all their digits, truth is
    true or false, what is unknown is empty.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = list(names) or columns(table)
    writer.writerow(names)
    writer.writerows([_cell(row[name]) for name in names] for row in table)
    write_text(out / "table.csv", text.getvalue())


def _cell(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def summarize(config: RunConfig, records: Sequence[Json], cpu_seconds: float) -> Json:
    """One value per records.TABLE_COLUMNS, from the lines of metrics.jsonl (the first: step 0, the last: the end).
    What the task records besides records.STEP_FIELDS follows, as it was at the end.
    """
    first, last = records[0], records[-1]
    losses = [record["train_loss"] for record in records if record["train_loss"] is not None]
    return {
        "remedy": config.remedy,
        "lr": config.optim.lr,
        "seed": config.seed,
        "steps": last["step"],
        "val_loss": last["val_loss"],
        "max_logit": largest(record["max_logit"] for record in records),
        "end_max_logit": last["max_logit"],
        "end_entropy": last["entropy"],
        "alarm_step": metrics.alarm_step(records),
        "collapsed": metrics.collapsed(last["entropy"], last["val_loss"], first["val_loss"]),
        "cpu_seconds": round(cpu_seconds, 3),
        "run_id": config.run_id,
        "capped_max_logit": largest(record["capped_max_logit"] for record in records),
        "max_abs_logit": largest(record["max_abs_logit"] for record in records),
        "init_loss": first["val_loss"],
        "spike_score": metrics.spike_score(losses),
        "block": config.model.block,
        "optimizer": config.optim.name,
        "status": "done",
        **{name: value for name, value in last.items() if name not in STEP_FIELDS},
    }


def largest(values: Iterable[float]) -> float:
    """The largest value that is a number; NaN if none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
