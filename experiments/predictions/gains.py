"""The law of gains: how much a remedy lowers the loss of a run, fitted, frozen, and tested on sizes that it never saw.

    python -m experiments.predictions.gains freeze    from gain-fit.csv: writes the remedies of the table that the
    package carries
    python -m experiments.predictions.gains           writes the tables of experiments/notes/results/gains.md

A gain is the held-out loss of one run without the remedy less that of the run of its seed with it. Form and intervals
are chosen as those of the law of logits are, in `predictions.drift_law`. Nothing that is frozen reads the table of the
test. What refutes it: its intervals cover less than 85 % of the pairs of the test.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.predictions.drift import GAINS
from experiments.predictions.drift_law import FIT, HEAD, LEVEL, Points, Row, choose, fit, read_rows
from experiments.predictions.drift_verdict import COVERED, written
from experiments.predictions.law import EVIDENCE, band, evidence, predict
from qkeel.lab.config import RunConfig
from qkeel.metrics import paired_effect
from qkeel.records import read_json

PAGE = Path(__file__).parents[1] / "notes" / "results" / "gains.md"
GAIN_FIT, GAIN_TEST = FIT.with_name("gain-fit.csv"), FIT.with_name("gain-test.csv")
COST_TABLE = FIT.parents[2] / "benchmarks" / "results" / "cpu-2026-11-21.json"
# The forms of a remedy's gain, in the letters of the law of logits; Σ lr is part of none.
GAIN_FORMS: dict[str, tuple[str, ...]] = {
    "of rate": ("", "r"),
    "of rate and sizes": ("", "r", "w", "l"),
    "of rate times sizes": ("", "r", "w", "l", "rw", "rl"),
    "quadratic in the rate": ("", "r", "rr"),
    "quadratic in the rate, and sizes": ("", "r", "w", "l", "rr"),
    "quadratic in the rate, times sizes": ("", "r", "w", "l", "rr", "rw", "rl"),
    "quadratic in the rate, times sizes, and sizes times each other": ("", "r", "w", "l", "rr", "rw", "rl", "wl"),
    "quadratic in the rate times sizes": ("", "r", "w", "l", "rr", "rw", "rl", "wl", "rrw", "rrl"),
}
# What a remedy's cost is a ratio of, measured apart from the study: its runs are too small and share stacks.
COSTS = {
    "qk_norm": (
        "an attention module, forward and backward",
        "attention modules, forward + backward",
        "qkeel rope + norm",
    ),
    "lalr:tau=0.1": ("the optimizer step, by torch's operations", "optimizer step", "AdamW, fused + lalr"),
}
CLIP = {"value": 1.0146, "low": 1.0009, "high": 1.0185, "of": "the optimizer step, with up to 17 % of heads clipped"}


def gains(rows: Sequence[Row], remedy: str) -> Points:
    """Returns the gain of a remedy over none, pair by pair; a loss that is not finite is left out."""
    none = {(row.cell, row.config.seed): row for row in rows if row.config.remedy == "none"}
    found = [
        (i, none[row.cell, row.config.seed].val_loss - row.val_loss)
        for i, row in enumerate(rows)
        if row.config.remedy == remedy and (row.cell, row.config.seed) in none
    ]
    number, values = map(np.array, zip(*((i, gain) for i, gain in found if math.isfinite(gain))))
    return Points(rows, number, values, np.ones(len(values)), np.ones(len(values), dtype=bool))


def cost(remedy: str) -> dict[str, Any]:
    """Returns the ratio of processor time to that without the remedy, median and span, of what, and where it stands."""
    if remedy not in COSTS:
        return {**CLIP, "source": "docs/benchmarks.md, the optimizer step"}
    of, name, case = COSTS[remedy]
    table = next(rows for title, rows in read_json(COST_TABLE)["tables"].items() if title.startswith(name))
    ratios = {row["case"]: row["ratio"] for row in table}
    base = ratios.get("qkeel rope", [1.0] * 3)[1]
    low, value, high = (round(ratio / base, 3) for ratio in ratios[case])
    return {"value": value, "low": low, "high": high, "of": of, "source": f"benchmarks/results/{COST_TABLE.name}"}


def rows_of_evidence(points: Points) -> list[dict[str, Any]]:
    """Returns a row for each size and rate: the mean gain over the seeds with its 95 % interval."""
    cells: dict[tuple[object, ...], list[int]] = {}
    for place, number in enumerate(points.number):
        cells.setdefault(points.rows[number].cell, []).append(place)
    found = []
    for places in cells.values():
        config = points.rows[points.number[places[0]]].config
        effect = paired_effect(points.values[places])
        about = {"width": config.model.d_model, "depth": config.model.n_layers, "lr": config.optim.lr}
        said = {"mean": effect.mean, "low": effect.low, "high": effect.high}
        found.append({**about, **{k: round(v, 4) for k, v in said.items()}, "seeds": effect.n})
    return found


def box(part: str) -> dict[str, Sequence[float]]:
    """Returns what a part spans, by setting: lowest and highest."""
    sizes, lrs, _ = GAINS[part]
    widths, depths = zip(*sizes)
    spans = {"model.d_model": widths, "model.n_layers": depths, "optim.lr": lrs}
    return {**{name: [min(span), max(span)] for name, span in spans.items()}, **HEAD}


def frozen(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the law of gains of each remedy as the package carries it, from the fitting grid alone."""
    remedies = {}
    for remedy in dict.fromkeys(row.config.remedy for row in rows if row.config.remedy != "none"):
        pairs = gains(rows, remedy)
        tried = choose(pairs, GAIN_FORMS)
        form = next(iter(tried))
        law = {"form": form, "tried": {name: round(error, 4) for name, error in tried.items()}}
        table = {**law, "level": LEVEL, **fit(pairs, GAIN_FORMS[form])}
        remedies[remedy] = {"cost": cost(remedy), "gain": table, "rows": rows_of_evidence(pairs)}
    return {"gain_boxes": [box("gain-fit"), box("gain-test")], "remedies": remedies}


def law_text() -> str:
    """Returns the frozen law of each remedy with its numbers."""
    lines = ["| remedy | form | gain, nats per byte | half width at rates up to 0.02 | 0.02 to 0.05 | above |"]
    lines.append("|---|---|---|---|---|---|")
    for remedy, about in evidence()["remedies"].items():
        law = about["gain"]
        terms = [f"{c:+.3f}{'·' if name else ''}{'·'.join(name)}" for name, c in law["coefficients"].items()]
        halves = [f"± {inside:.3f}, one doubling outside ± {outside:.3f}" for inside, outside in law["half_widths"]]
        lines.append(f"| `{remedy}` | {law['form']} | `{' '.join(terms)}` | {' | '.join(halves)} |")
    return "\n".join(lines)


def predictions() -> str:
    """Returns what is predicted of each cell of the test, from the frozen table alone."""
    from_table = evidence()["remedies"]
    lines = [f"| cell | rate | {' | '.join(f'`{remedy}`' for remedy in from_table)} |", "|---|---|" + "---|" * 3]
    sizes, lrs, _ = GAINS["gain-test"]
    for width, depth in sizes:
        for lr in lrs:
            config = RunConfig.from_dict(
                {"model": {"d_model": width, "n_layers": depth, "n_heads": width // 16}, "optim": {"lr": lr}}
            )
            said = [predict(config, about["gain"], 1.0) for about in from_table.values()]
            cells = [f"{gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})" for gain in said]
            lines.append(f"| width {width}, blocks {depth} | {lr:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def covered(rows: Sequence[Row], remedy: str) -> dict[str, list[bool]]:
    """Returns by size, and by band of rates, whether each pair's gain lies in its interval."""
    law, pairs = evidence()["remedies"][remedy]["gain"], gains(rows, remedy)
    found: dict[str, list[bool]] = {}
    for number, value in zip(pairs.number, pairs.values):
        config = pairs.rows[number].config
        gain = predict(config, law, 1.0)
        bands = ("rates up to 0.02", "rates 0.02 to 0.05", "rates above 0.05")
        names = (f"width {config.model.d_model}, blocks {config.model.n_layers}", bands[band(config, law)], "all")
        for name in names:
            found.setdefault(name, []).append(gain.low <= value <= gain.high)
    return found


def coverage(rows: Sequence[Row]) -> dict[str, dict[str, list[bool]]]:
    """Returns `covered` by remedy."""
    return {remedy: covered(rows, remedy) for remedy in evidence()["remedies"]}


def holds(found: dict[str, dict[str, list[bool]]]) -> bool:
    """Whether the intervals cover the share that was asked for, over all remedies."""
    inside = [one for groups in found.values() for one in groups["all"]]
    return sum(inside) >= COVERED * len(inside)


def verdict(rows: Sequence[Row]) -> str:
    """Returns the results of the test in a table, and what follows."""
    found = coverage(rows)
    lines = [f"| pairs of runs | {' | '.join(f'`{remedy}`' for remedy in found)} |", "|---|" + "---|" * len(found)]
    for name in sorted(next(iter(found.values()))):
        cells = [f"{sum(groups[name])} of {len(groups[name])}" for groups in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    inside = [one for groups in found.values() for one in groups["all"]]
    share = f"{sum(inside)} of {len(inside)} ({sum(inside) / len(inside):.0%})"
    enough = "at least" if holds(found) else "less than"
    refuted = "not refuted" if holds(found) else "**refuted**"
    lines += ["", f"Intervals of gains cover {share}: {enough} the {COVERED:.0%} that was asked for; {refuted}."]
    return "\n".join(lines)


def page(text: str) -> str:
    """Returns the page with the tables that follow from the frozen table and, where it is there, from the test's."""
    text = written(written(text, "law", law_text()), "prediction", predictions())
    return written(text, "verdict", verdict(read_rows(GAIN_TEST)) if GAIN_TEST.exists() else "The test is not run yet.")


def main() -> None:
    if sys.argv[1:] == ["freeze"]:
        EVIDENCE.write_text(json.dumps({**read_json(EVIDENCE), **frozen(read_rows(GAIN_FIT))}, indent=1) + "\n")
    else:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
