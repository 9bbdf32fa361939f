"""The directory of a study: study.json, table.csv and chaos.json."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from qkeel import metrics
from qkeel.errors import RunDirectoryError
from qkeel.lab.config import RunConfig
from qkeel.lab.plan import MOVED, UNMOVED, Grid, Plan, check_choices
from qkeel.metrics import distance, divergence_rate
from qkeel.options import Json
from qkeel.records import STEP_FIELDS, TABLE_COLUMNS, RunDirectory, RunStatus, write_json, write_text
from qkeel.records.disk import refuse_links, refuse_path
from qkeel.records.files import read_checked
from qkeel.records.run_directory import differences

# table.csv has one row per run in the order of the grid; the same results always give the same bytes.


def rows(out: Path, entries: Sequence[Json]) -> list[Json]:
    """Returns one dict per run by `columns`; a run without a result has only its name and status."""
    table = [_row(RunDirectory(out / "runs" / entry["run_id"]), entry) for entry in entries]
    names = columns(table)
    return [{name: row.get(name) for name in names} for row in table]


def columns(table: Iterable[Json]) -> list[str]:
    """Returns records.TABLE_COLUMNS, then the columns that the tasks of the runs add."""
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
    """Writes table.csv atomically, by default with all columns of the table.

    Floats have all their digits, booleans are true or false, unknown values are empty.
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
    """Returns one value per records.TABLE_COLUMNS from the lines of metrics.jsonl, from step 0 to the end.

    The last values of additional task fields follow.
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
    """Returns the largest value that is not NaN; NaN if there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


# study.json, the record of a study.

_AXES = tuple(field.name for field in dataclasses.fields(Grid))


def study_of(plan: Plan, command: str) -> Json:
    """Returns the study.json of a plan."""
    contexts = {} if plan.contexts is None else {"contexts": dataclasses.asdict(plan.contexts)}
    about = {
        "study": plan.name,
        "command": command,
        **dataclasses.asdict(plan.grid),
        **contexts,
        **({"tuned": list(plan.tuned)} if plan.tuned else {}),
        **({"primary": dataclasses.asdict(plan.primary)} if plan.primary else {}),
        "runs": [
            run.entry() if plan.primary is None else {**run.entry(), "primary": plan.primary.holds(run)}
            for run in plan.runs
        ],
        "base": plan.bases(),
    }
    # A round trip through JSON turns tuples into lists, so that the result compares equal to a file's contents.
    return json.loads(json.dumps(about))


def joined_study(out: Path, old: Json, new: Json) -> Json:
    """Joins the study.json of the directory `out` (`old`) with another part of the same study; each run appears once.

    Raises:
        RunDirectoryError: the two differ in more than remedies, rates, seeds and other axes.
    """
    _check_same_study(out, old, new)
    known = {entry["run_id"] for entry in old["runs"]}
    more = [entry for entry in new["runs"] if entry["run_id"] not in known]
    commands = [*old["command"].splitlines(), *(new["command"].splitlines() if more else [])]
    axes = {name: list(dict.fromkeys([*(old.get(name) or ()), *(new.get(name) or ())])) for name in _AXES}
    axes = {name: sorted(values) if name in ("lrs", "seeds") else values for name, values in axes.items()}
    bases = {**old["base"], **new["base"]}
    contexts = {"contexts": _joined_contexts(old.get("contexts"), new["contexts"])} if "contexts" in new else {}
    return {
        "study": new["study"],
        "command": "\n".join(dict.fromkeys(filter(None, commands))),
        **axes,
        **contexts,
        **({"tuned": _joined_choices(old, new, out)} if "tuned" in new else {}),
        **({"primary": new["primary"]} if "primary" in new else {}),
        "runs": in_order([*old["runs"], *more], axes["remedies"], list(bases)),
        "base": bases,
    }


def _joined_choices(old: Json, new: Json, out: Path) -> list[Json]:
    """Returns the chosen rates of both; those of `new` take precedence."""
    before = old.get("tuned", [])
    check_choices(before, new["tuned"], out)
    both = {(choice["role"], choice["remedy"]): choice for choice in [*before, *new["tuned"]]}
    return list(both.values())


def read_study(out: Path) -> Json:
    """Reads the study.json of a directory and checks its fields against records.files.

    Raises:
        RunDirectoryError: the file is damaged, or names directories outside the study.
    """
    refuse_links(out / "runs")
    file = out / "study.json"
    about = read_checked(file)
    lost = [name for name in ("study", "base", "remedies", "lrs", "seeds", "command") if about.get(name) is None]
    if lost:
        raise RunDirectoryError(
            f"{file} lacks {', '.join(lost)}; it was not written by qkeel or was damaged later. "
            "Restore it, or choose another directory; nothing was changed."
        )
    for entry in about["runs"]:
        refuse_path(entry["run_id"], str(file))
        if entry.get("role") not in about["base"]:
            raise RunDirectoryError(
                f"{file} has no base for the role {entry.get('role')!r} of {entry['run_id']}; it was damaged. "
                "Restore it, or choose another directory; nothing was changed."
            )
    return about


def _joined_contexts(old: Json | None, new: Json) -> Json:
    """Joins methods and lengths; the numbers of sequences and steps must be equal."""
    if old is None:
        return dict(new)
    for name, what in (
        ("sequences", "measures on {} held-out sequences"),
        ("continue_steps", "continues training for {} steps"),
    ):
        if old[name] != new[name]:
            raise RunDirectoryError(
                f"this study {what.format(old[name])}, not {new[name]}; choose another directory; nothing was changed."
            )
    return {
        **new,
        "posthoc": list(dict.fromkeys([*old["posthoc"], *new["posthoc"]])),
        "test_lengths": sorted({*old["test_lengths"], *new["test_lengths"]}),
    }


def _check_same_study(out: Path, old: Json, new: Json) -> None:
    changed = [] if old["study"] == new["study"] else [f"study: {old['study']}, not {new['study']}"]
    if ("tuned" in old) != ("tuned" in new):
        changed.append("tune: whether each remedy is compared at its own rate")
    if old.get("primary") != new.get("primary"):
        changed.append("primary: the comparison that the study decides")
    for role, base in new["base"].items():
        changed += differences(old["base"].get(role, base), base)
    if changed:
        raise RunDirectoryError(
            f"{out} contains a study of another configuration (different: {', '.join(dict.fromkeys(changed))}). Only "
            "remedies, rates and seeds can be added to a study. Choose another directory; nothing was changed."
        )


def in_order(entries: Sequence[Json], remedies: Sequence[str], roles: Sequence[str]) -> list[Json]:
    """Sorts the runs of a study by role, remedy, rate and seed, the order of its table."""
    place = {remedy: i for i, remedy in enumerate(remedies)}

    def key(entry: Json) -> tuple[int, int, float, int]:
        remedy = place.get(entry["remedy"], len(place))
        return roles.index(entry["role"]), remedy, entry["lr"], entry["seed"]

    return sorted(entries, key=key)


# chaos.json: how far the two runs of each pair diverged, and how fast.

_LOGITS = ("max_logit", "min_logit")


def write_chaos(out: Path, about: Json) -> None:
    """Writes chaos.json if the study has pairs: their common configuration, and one entry per finished pair.

    Pairs of a study with parts, e.g. several widths, have no common configuration; each names its part. The distance of
    a pair is the root mean square difference of the largest and smallest logit of every head on the probe.
    """
    if not any(role.partition(", ")[0] == MOVED for role in about["base"]):
        return
    runs = {(e["role"], e["remedy"], e["lr"], e["seed"]): out / "runs" / e["run_id"] for e in about["runs"]}
    pairs = []
    for (role, *key), place in runs.items():
        own, _, part = role.partition(", ")
        other = runs.get((f"{MOVED}, {part}" if part else MOVED, *key))
        if own == UNMOVED and other is not None:
            both = RunDirectory(place), RunDirectory(other)
            if all(run.status is RunStatus.DONE for run in both):
                named = {**({"part": part} if part else {}), **dict(zip(("remedy", "lr", "seed"), key))}
                pairs.append({**named, **_parted(both)})
    write_json(out / "chaos.json", {"base": about["base"].get(UNMOVED, {}), "pairs": pairs})


def _parted(both: Sequence[RunDirectory]) -> Json:
    heads = [run.heads() for run in both]
    steps = min((own.steps for own in heads), key=len)  # a run that diverges to NaN stops early
    courses = [np.stack([own.values[name][: len(steps)] for name in _LOGITS], axis=1) for own in heads]
    apart = distance(*courses)
    rate = divergence_rate(steps.tolist(), apart, distance(np.zeros_like(courses[0]), courses[0]))
    losses = [float(run.summary()["val_loss"]) for run in both]
    return {
        "loss_difference": abs(losses[1] - losses[0]),
        "logit_distance": float(apart[-1]),
        "exponent": None if math.isnan(rate) else rate,
    }
