"""study.json, the record of a study: what was planned, and how a later plan for the same directory joins it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from qkeel.errors import RunDirectoryError
from qkeel.lab.plan import Grid, Plan
from qkeel.lab.tuning import check_choices
from qkeel.options import Json
from qkeel.records.disk import refuse_path
from qkeel.records.file_formats import read_object
from qkeel.records.run_directory import differences

_AXES = tuple(field.name for field in dataclasses.fields(Grid))


def study_of(plan: Plan, command: str) -> Json:
    """Returns the study.json of a plan."""
    named = plan.primary
    about = {
        "study": plan.name,
        "command": command,
        **dataclasses.asdict(plan.grid),
        "contexts": plan.contexts and dataclasses.asdict(plan.contexts),
        "tuned": list(plan.tuned) or None,
        "primary": named and dataclasses.asdict(named),
        "runs": [
            run.entry() | ({"primary": named.holds(run)} if named else {})
            for run in plan.runs
        ],
        "base": plan.bases(),
    }
    # A round trip through JSON turns tuples into lists, so that the result compares equal to a file's contents.
    return json.loads(json.dumps(_known(about)))


def _known(about: Json) -> Json:
    return {name: value for name, value in about.items() if value is not None}


def joined_study(out: Path, old: Json, new: Json) -> Json:
    """Joins `old`, the study.json of the directory `out`, with another part of the same study; each run appears once.

    Raises:
        RunDirectoryError: the two parts differ in more than remedies, rates, seeds and other axes.
    """
    _check_same_study(out, old, new)
    recorded = {entry["run_id"] for entry in old["runs"]}
    added = [entry for entry in new["runs"] if entry["run_id"] not in recorded]
    commands = [
        *old["command"].splitlines(),
        *(new["command"].splitlines() if added else []),
    ]
    axes = {
        name: list(dict.fromkeys([*(old.get(name) or ()), *(new.get(name) or ())]))
        for name in _AXES
    }
    axes = {
        name: sorted(values) if name in ("lrs", "seeds") else values
        for name, values in axes.items()
    }
    bases = {**old["base"], **new["base"]}
    about = {
        "study": new["study"],
        "command": "\n".join(dict.fromkeys(filter(None, commands))),
        **axes,
        "contexts": _joined_contexts(old.get("contexts"), new["contexts"])
        if "contexts" in new
        else None,
        "tuned": _joined_choices(old, new, out) if "tuned" in new else None,
        "primary": new.get("primary"),
        "runs": in_order(
            [*old["runs"], *added],
            axes["remedies"],
            list(bases),
        ),
        "base": bases,
    }
    return _known(about)


def _joined_choices(old: Json, new: Json, out: Path) -> list[Json]:
    """Returns the chosen rates of both parts; the rates of `new` take precedence."""
    before = old.get("tuned", [])
    check_choices(before, new["tuned"], out)
    choices = {
        (choice["role"], choice["remedy"]): choice
        for choice in [*before, *new["tuned"]]
    }
    return list(choices.values())


def read_study(out: Path) -> Json:
    """Reads the study.json of a directory.

    Raises:
        RunDirectoryError: the file is damaged, or names directories outside the study.
    """
    file = out / "study.json"
    about = read_object(
        file, "study", "base", "remedies", "lrs", "seeds", "command", "runs"
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
    """Joins the methods and lengths; the numbers of sequences and steps must be equal."""
    if old is None:
        return dict(new)
    for name, sentence in (
        ("sequences", "measures on {} held-out sequences"),
        ("continue_steps", "continues training for {} steps"),
    ):
        if old[name] != new[name]:
            raise RunDirectoryError(
                f"this study {sentence.format(old[name])}, not {new[name]}; choose another directory; nothing was "
                "changed."
            )
    return {
        **new,
        "posthoc": list(dict.fromkeys([*old["posthoc"], *new["posthoc"]])),
        "test_lengths": sorted({*old["test_lengths"], *new["test_lengths"]}),
    }


def _check_same_study(out: Path, old: Json, new: Json) -> None:
    changed = (
        []
        if old["study"] == new["study"]
        else [f"study: {old['study']}, not {new['study']}"]
    )
    if ("tuned" in old) != ("tuned" in new):
        changed.append("tune: whether each remedy is compared at its own rate")
    if old.get("primary") != new.get("primary"):
        changed.append("primary: the primary comparison of the study")
    for role, base in new["base"].items():
        changed += differences(old["base"].get(role, base), base)
    if changed:
        raise RunDirectoryError(
            f"{out} contains a study with a different configuration (these differ: "
            f"{', '.join(dict.fromkeys(changed))}). Only remedies, rates and seeds can be added to a study. Choose "
            "another directory; nothing was changed."
        )


def in_order(
    entries: Sequence[Json], remedies: Sequence[str], roles: Sequence[str]
) -> list[Json]:
    """Sorts the runs of a study by role, remedy, rate and seed, the order of its table."""
    order = {remedy: i for i, remedy in enumerate(remedies)}

    def key(entry: Json) -> tuple[int, int, float, int]:
        remedy = order.get(entry["remedy"], len(order))
        return roles.index(entry["role"]), remedy, entry["lr"], entry["seed"]

    return sorted(entries, key=key)
