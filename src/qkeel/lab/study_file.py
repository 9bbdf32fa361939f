"""study.json, the record of a study: what was planned, and how a later plan for the same directory joins it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from qkeel.errors import RunDirectoryError
from qkeel.lab.plan import Grid, Plan
from qkeel.options import Json
from qkeel.records.disk import refuse_path
from qkeel.records.file_formats import read_object
from qkeel.records.run_directory import differences

_AXES = tuple(field.name for field in dataclasses.fields(Grid))
_UNCHANGED = "Choose another directory; nothing was changed."


def study_of(plan: Plan, command: str) -> Json:
    """Returns the study.json of a plan."""
    primary = plan.primary
    entries = []
    for run in plan.runs:
        named = {} if primary is None else {"primary": primary.holds(run)}
        entries.append(run.entry() | named)
    about = {
        "study": plan.name,
        "command": command,
        **dataclasses.asdict(plan.grid),
        "contexts": plan.contexts and dataclasses.asdict(plan.contexts),
        "primary": primary and dataclasses.asdict(primary),
        "runs": entries,
        "base": plan.bases(),
    }
    # A round trip through JSON turns tuples into lists, so that the result compares equal to a file's contents.
    return _in_order(json.loads(json.dumps(about)))


def joined_study(out: Path, old: Json, new: Json) -> Json:
    """Joins `old`, the study.json of the directory `out`, with another part of the same study; each run appears once.

    Raises:
        RunDirectoryError: the two parts differ in more than remedies, rates, seeds and other axes.
    """
    _check_same_study(out, old, new)
    recorded = {entry["run_id"] for entry in old["runs"]}
    added = [entry for entry in new["runs"] if entry["run_id"] not in recorded]
    commands = old["command"].splitlines()
    # a repetition is no new command.
    if added:
        commands += new["command"].splitlines()
    axes = {}
    for name in _AXES:
        values = dict.fromkeys([*(old.get(name) or ()), *(new.get(name) or ())])
        axes[name] = sorted(values) if name in ("lrs", "seeds") else list(values)
    about = {
        **new,
        **axes,
        "command": "\n".join(dict.fromkeys(filter(None, commands))),
        "runs": [*old["runs"], *added],
        "base": {**old["base"], **new["base"]},
    }
    if "contexts" in new:
        about["contexts"] = _joined_contexts(old.get("contexts"), new["contexts"])
    return _in_order(about)


def read_study(out: Path) -> Json:
    """Reads the study.json of a directory.

    Raises:
        RunDirectoryError: the file is damaged, or names directories outside the study.
    """
    file = out / "study.json"
    names = ("study", "base", "remedies", "lrs", "seeds", "command", "runs")
    about = read_object(file, *names)
    for entry in about["runs"]:
        refuse_path(entry["run_id"], str(file))
        if entry.get("role") not in about["base"]:
            raise RunDirectoryError(
                f"{file} has no base for the role {entry.get('role')!r} of {entry['run_id']}; it was damaged. "
                "Restore it, or choose another directory; nothing was changed."
            )
    return about


def _joined_contexts(old: Json | None, new: Json) -> Json:
    """Joins the methods and lengths; the numbers of sequences and steps must be equal."""
    old = old or new
    for name, sentence in (
        ("sequences", "measures on {} held-out sequences"),
        ("continue_steps", "continues training for {} steps"),
    ):
        if old[name] != new[name]:
            raise RunDirectoryError(
                f"this study {sentence.format(old[name])}, not {new[name]}. {_UNCHANGED}"
            )
    methods = list(dict.fromkeys([*old["posthoc"], *new["posthoc"]]))
    lengths = sorted({*old["test_lengths"], *new["test_lengths"]})
    return {**new, "posthoc": methods, "test_lengths": lengths}


def _check_same_study(out: Path, old: Json, new: Json) -> None:
    changes = []
    if old["study"] != new["study"]:
        changes.append(f"study: {old['study']}, not {new['study']}")
    if old.get("primary") != new.get("primary"):
        changes.append("primary: the primary comparison of the study")
    for role, base in new["base"].items():
        changes += differences(old["base"].get(role, base), base)
    if changes:
        raise RunDirectoryError(
            f"{out} contains a study with a different configuration (these differ: "
            f"{', '.join(dict.fromkeys(changes))}). Only remedies, rates and seeds can be added to a study. {_UNCHANGED}"
        )


def _in_order(about: Json) -> Json:
    """Sorts the runs by role, remedy, rate and seed, the order of the table, and leaves out what the study has not."""
    role_order, remedy_order = list(about["base"]), about["remedies"]

    def key(entry: Json) -> tuple[int, int, float, int]:
        remedy = entry["remedy"]
        rank = (
            remedy_order.index(remedy) if remedy in remedy_order else len(remedy_order)
        )
        return role_order.index(entry["role"]), rank, entry["lr"], entry["seed"]

    runs = sorted(about["runs"], key=key)
    known = {name: value for name, value in about.items() if value is not None}
    return {**known, "runs": runs}
