"""Tuning: each remedy's learning rate is chosen on seeds that no compared run has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from qkeel.errors import RunDirectoryError
from qkeel.lab.plan import Plan
from qkeel.options import Json

TUNING_FOLDER = "tuning"


def tuning_plan(plan: Plan) -> Plan:
    """Returns the plan of the tuning runs, which are the runs of a plan with the grid's tuning seeds."""
    grid = plan.grid
    # One run per remedy, rate and part; each is then repeated with every tuning seed.
    first = [run for run in plan.runs if run.config.seed == grid.seeds[0]]
    configs = [
        (run, dataclasses.replace(run.config, seed=seed))
        for run in first
        for seed in grid.tuning_seeds
    ]
    runs = [dataclasses.replace(run, config=config) for run, config in configs]
    axes = dataclasses.replace(grid, seeds=grid.tuning_seeds, tuning_seeds=())
    return dataclasses.replace(plan, grid=axes, runs=runs, contexts=None)


def tuned_plan(plan: Plan, table: Sequence[Mapping[str, object]]) -> Plan:
    """Returns the plan with each remedy of each role at only its best rate, by mean loss on the tuning seeds.

    A loss that is not finite counts as infinite; if two rates are equally good, the lower one is chosen. The `border`
    of a choice says whether it is the lowest or the highest rate of the grid, in which case a better rate may lie
    outside the grid.

    Args:
        plan: the plan with all rates.
        table: rows of the runs of `tuning_plan(plan)`, and possibly of other runs.

    Raises:
        RunDirectoryError: a tuning run has not finished.
    """
    losses: dict[object, float] = {}
    for row in table:
        if row["status"] == "done":
            loss = row["val_loss"]
            losses[row["run_id"]] = (
                loss if isinstance(loss, float) and math.isfinite(loss) else math.inf
            )
    rates: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in tuning_plan(plan).runs:
        if run.config.run_id not in losses:
            raise RunDirectoryError(
                f"the run of {run.name} at rate {run.config.optim.lr:g} on tuning seed {run.config.seed} has not "
                "finished, so no rate can be chosen; run this command again to finish it"
            )
        by_rate = rates.setdefault((run.role, run.name), {})
        by_rate.setdefault(run.config.optim.lr, []).append(losses[run.config.run_id])
    tuned = [
        _chosen(role, name, by_rate, plan.grid.tuning_seeds)
        for (role, name), by_rate in rates.items()
    ]
    best = {(choice["role"], choice["remedy"]): choice["lr"] for choice in tuned}
    runs = [run for run in plan.runs if run.config.optim.lr == best[run.role, run.name]]
    return dataclasses.replace(plan, runs=runs, tuned=tuned)


def _chosen(
    role: str, name: str, by_rate: Mapping[float, Sequence[float]], seeds: Sequence[int]
) -> Json:
    means = {lr: sum(losses) / len(losses) for lr, losses in sorted(by_rate.items())}
    rates = list(means)
    # Rates are in rising order, so of two equally good ones the lower is chosen.
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


def in_words(choice: Json) -> str:
    """Describes a choice in a sentence.

    >>> in_words({"role": "grid", "remedy": "none", "lr": 0.1, "border": "highest", "seeds": [7]})
    'none: rate 0.1, chosen on seeds 7; the highest rate of the grid, so a better rate may lie outside'
    """
    role = "" if choice["role"] == "grid" else f"{choice['role']}, "
    edge = (
        f"; the {choice['border']} rate of the grid, so a better rate may lie outside"
        if choice["border"]
        else ""
    )
    seeds = " ".join(map(str, choice["seeds"]))
    return f"{role}{choice['remedy']}: rate {choice['lr']:g}, chosen on seeds {seeds}{edge}"


def check_choices(old: Sequence[Json], new: Sequence[Json], out: object) -> None:
    """Raises RunDirectoryError if the directory already compares a remedy at a different rate."""
    before = {(choice["role"], choice["remedy"]): choice["lr"] for choice in old}
    for choice in new:
        rate = before.get((choice["role"], choice["remedy"]), choice["lr"])
        if rate != choice["lr"]:
            raise RunDirectoryError(
                f"{out} compares {choice['remedy']} at rate {rate:g}, but with more rates or tuning seeds the best "
                f"rate is {choice['lr']:g}. Choose another directory; the compared runs were not changed."
            )
