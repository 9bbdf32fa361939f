"""The learning rate of each remedy, chosen on seeds that no compared run has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from qkeel.errors import RunDirectoryError
from qkeel.lab.plan import Plan
from qkeel.options import Json

FOLDER = "tuning"  # of a study's directory: the study that its rates are chosen by


def tuning_plan(plan: Plan) -> Plan:
    """Returns the plan of what rates are chosen by: the runs of a plan, on the grid's tuning seeds."""
    grid = plan.grid
    first = [run for run in plan.runs if run.config.seed == grid.seeds[0]]
    configs = [(run, dataclasses.replace(run.config, seed=seed)) for run in first for seed in grid.tuning_seeds]
    runs = [dataclasses.replace(run, config=config) for run, config in configs]
    own = dataclasses.replace(grid, seeds=grid.tuning_seeds, tuning_seeds=())
    return dataclasses.replace(plan, grid=own, runs=runs, contexts=None)


def tuned_plan(plan: Plan, table: Sequence[Mapping[str, object]]) -> Plan:
    """Returns the plan with each remedy of each role at its best rate only: of the smallest mean loss on tuning seeds.

    A loss that is not finite counts as infinite; of two rates that are equally good the lower is taken. `border` of a
    choice says whether it is the lowest or highest rate of the grid, so that a better one may lie outside.

    Args:
        plan: with all rates. table: a row for each run of `tuning_plan(plan)`, and for others.

    Raises: RunDirectoryError where a run has no row, since it failed or another shard is to do it.
    """
    losses = {row["run_id"]: _loss(row["val_loss"]) for row in table if row["status"] == "done"}
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in tuning_plan(plan).runs:
        if run.config.run_id not in losses:
            raise RunDirectoryError(
                f"the run of {run.name} at rate {run.config.optim.lr:g} on tuning seed {run.config.seed} is not done, "
                "so no rate can be chosen: it failed, or another shard is to do it. Start this command again then"
            )
        by_rate = found.setdefault((run.role, run.name), {})
        by_rate.setdefault(run.config.optim.lr, []).append(losses[run.config.run_id])
    tuned = [_chosen(role, name, by_rate, plan.grid.tuning_seeds) for (role, name), by_rate in found.items()]
    best = {(choice["role"], choice["remedy"]): choice["lr"] for choice in tuned}
    runs = [run for run in plan.runs if run.config.optim.lr == best[run.role, run.name]]
    return dataclasses.replace(plan, runs=runs, tuned=tuned)


def _chosen(role: str, name: str, by_rate: Mapping[float, Sequence[float]], seeds: Sequence[int]) -> Json:
    means = {lr: sum(losses) / len(losses) for lr, losses in sorted(by_rate.items())}
    rates = list(means)
    best = min(rates, key=lambda lr: means[lr])
    border = "lowest" if best == rates[0] else "highest" if best == rates[-1] else ""
    return {
        "role": role,
        "remedy": name,
        "lr": best,
        "val_loss": means[best] if math.isfinite(means[best]) else None,
        "border": border if len(rates) > 1 else "only",
        "lrs": rates,
        "seeds": list(seeds),
    }


def _loss(value: object) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else math.inf


def in_words(choice: Json) -> str:
    """Returns a sentence about a choice.

    >>> in_words({"role": "grid", "remedy": "none", "lr": 0.1, "border": "highest", "seeds": [7]})
    'none: rate 0.1, chosen on seeds 7; the highest rate of the grid, so a better one may lie outside'
    """
    part = "" if choice["role"] == "grid" else f"{choice['role']}, "
    edge = f"; the {choice['border']} rate of the grid, so a better one may lie outside" if choice["border"] else ""
    seeds = " ".join(map(str, choice["seeds"]))
    return f"{part}{choice['remedy']}: rate {choice['lr']:g}, chosen on seeds {seeds}{edge}"


def check_choices(old: Sequence[Json], new: Sequence[Json], out: object) -> None:
    """Raises RunDirectoryError where a remedy was compared at another rate in the directory before."""
    before = {(choice["role"], choice["remedy"]): choice["lr"] for choice in old}
    for choice in new:
        rate = before.get((choice["role"], choice["remedy"]), choice["lr"])
        if rate != choice["lr"]:
            raise RunDirectoryError(
                f"{out} compares {choice['remedy']} at rate {rate:g}, and with more rates or tuning seeds "
                f"{choice['lr']:g} is chosen. Choose another directory; the compared runs were not changed."
            )
