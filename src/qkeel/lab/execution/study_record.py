"""The record of a study, study.json: read, checked, and joined with more of the same study."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from qkeel.errors import RunDirectoryError
from qkeel.lab.plan import Grid, Plan, PlannedRun
from qkeel.lab.tuning import check_choices
from qkeel.options import Json
from qkeel.records.file_fields import read_checked
from qkeel.records.regular_files import refuse_links, refuse_path
from qkeel.records.rundir import differences

_AXES = tuple(field.name for field in dataclasses.fields(Grid))


def study_of(plan: Plan, command: str) -> Json:
    """The study.json of a plan alone."""
    contexts = {} if plan.contexts is None else {"contexts": dataclasses.asdict(plan.contexts)}
    about = {
        "study": plan.name,
        "command": command,
        **dataclasses.asdict(plan.grid),
        **contexts,
        **({"tuned": list(plan.tuned)} if plan.tuned else {}),
        **({"primary": dataclasses.asdict(plan.primary)} if plan.primary else {}),
        "runs": [_entry(run, plan) for run in plan.runs],
        "base": plan.bases(),
    }
    # As JSON reads it back: a tuple becomes a list, a float that is whole stays a float.
    return json.loads(json.dumps(about))


def _entry(run: PlannedRun, plan: Plan) -> Json:
    """The run's line, with whether it is of the primary comparison where the plan names one."""
    return run.entry() if plan.primary is None else {**run.entry(), "primary": plan.primary.holds(run)}


def joined_study(out: Path, old: Json, new: Json) -> Json:
    """The study.json of two parts of one study, of which `old` is that of `out`: the runs of both, each once.

    Raises: RunDirectoryError unless the two differ in remedies, rates, seeds and the other axes only.
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
    """The chosen rates of both, those of `new` where both have one."""
    before = old.get("tuned", [])
    check_choices(before, new["tuned"], out)
    both = {(choice["role"], choice["remedy"]): choice for choice in [*before, *new["tuned"]]}
    return list(both.values())


def read_study(out: Path) -> Json:
    """The study.json of a directory, every field there and of its type; see records.file_fields.

    Raises: RunDirectoryError for a file that is damaged, or names directories that are not the study's.
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
                f"{file} has no base of the role {entry.get('role')!r} of {entry['run_id']}; it was damaged. "
                "Restore it, or choose another directory; nothing was changed."
            )
    return about


def _joined_contexts(old: Json | None, new: Json) -> Json:
    """Methods and lengths of both; how many sequences they are measured on stays as it was."""
    if old is None:
        return dict(new)
    for name, what in (
        ("sequences", "measures on {} held-out sequences"),
        ("continue_steps", "trains on for {} steps"),
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
        changed.append("tune: whether each remedy is compared at a rate of its own")
    if old.get("primary") != new.get("primary"):
        changed.append("primary: the comparison that it is made to decide")
    for role, base in new["base"].items():
        changed += differences(old["base"].get(role, base), base)
    if changed:
        raise RunDirectoryError(
            f"{out} holds a study of another configuration (different: {', '.join(dict.fromkeys(changed))}). A study "
            "takes more remedies, rates or seeds, nothing else. Choose another directory; nothing was changed."
        )


def in_order(entries: Sequence[Json], remedies: Sequence[str], roles: Sequence[str]) -> list[Json]:
    """The runs of a study in the order of its table: by role, remedy, rate and seed."""
    place = {remedy: i for i, remedy in enumerate(remedies)}

    def key(entry: Json) -> tuple[int, int, float, int]:
        remedy = place.get(entry["remedy"], len(place))
        return roles.index(entry["role"]), remedy, entry["lr"], entry["seed"]

    return sorted(entries, key=key)
