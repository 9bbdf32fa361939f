"""The frozen law of logit growth, judged on runs that it was not fitted on.

    python -m experiments.predictions.drift_verdict    writes the tables and pictures of
    experiments/notes/results/drift-law.md

Until drift-test.csv is there, the page has the prediction alone. What refutes the law: its intervals cover less than
85 % of the held-out runs, or its error is not shown to be smaller than that of both rivals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from benchmarks.charts import COLOURS, Axes, picture, span

from experiments.predictions.drift_law import FIT, TEST, Points, Row, read_rows, recipe, size_of
from experiments.predictions.law import Expected, evidence, expected_logit, summed_rates
from experiments.studies.drift import HELD_OUT
from qkeel.lab.config import RunConfig
from qkeel.metrics import PairedEffect, paired_effect

PAGE = Path(__file__).parents[1] / "notes" / "results" / "drift-law.md"
PICTURE = PAGE.parents[1] / "images" / "drift-law.svg"
BEGIN, END = "<!-- written by predictions: {} -->", "<!-- end of {} -->"
RIVALS = ("power law", "Wortsman's quadratic")
COVERED = 0.85  # the least share of held-out runs that intervals are to cover
Cells = dict[tuple[object, ...], list[Row]]


def by_cell(rows: Sequence[Row]) -> Cells:
    """Returns the runs without a remedy by size, rate and recipe."""
    found: Cells = {}
    for row in rows:
        if row.config.remedy == "none":
            found.setdefault(row.cell, []).append(row)
    return found


def at_end(config: RunConfig) -> Expected:
    """Returns what the law expects when the run ends."""
    return expected_logit(config, evidence()["law"], summed_rates(config)[-1])


def rivals(config: RunConfig) -> dict[str, float]:
    """Returns ln z at the end by rival; Wortsman's quadratic is of the recipe and the rates that it was fitted on."""
    a, p, q = evidence()["power_law"]
    found = {"power law": a + p * math.log(summed_rates(config)[-1]) + q * size_of(config)}
    quadratic = evidence()["wortsman"].get(f"{config.optim.lr:g}")
    if quadratic and recipe(config) == recipe(RunConfig()):
        found["Wortsman's quadratic"] = sum(c * size_of(config) ** i for i, c in enumerate(quadratic))
    return found


def measured(runs: Sequence[Row]) -> float:
    """Returns the mean over seeds of ln z at the end."""
    return float(np.mean([math.log(run.logits[-1]) for run in runs]))


def against(cells: Cells, rival: str) -> tuple[float, float, PairedEffect]:
    """Returns the mean error on ln z of the law and of a rival, and the effect of the difference: above 0, the law's is
    smaller. A cell counts once."""
    pairs = []
    for runs in cells.values():
        config = runs[0].config
        if rival in (other := rivals(config)):
            z = measured(runs)
            pairs.append((abs(math.log(at_end(config).value) - z), abs(other[rival] - z)))
    own, others = np.array(pairs).T
    return float(own.mean()), float(others.mean()), paired_effect(others - own)


def coverage(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Returns how many intervals hold the measured number, and of how many: ends of runs, all steps."""
    law, found = evidence()["law"], {}
    points = Points.of(rows)
    inside = []
    for number, value, summed in zip(points.number, points.values, points.summed):
        z = expected_logit(points.rows[number].config, law, summed)
        inside.append(math.log(z.low) <= value <= math.log(z.high))
    covered = np.array(inside)
    found["largest logit at the end of a run"] = (int(covered[points.last].sum()), int(points.last.sum()))
    found["largest logit at each recorded step"] = (int(covered.sum()), len(covered))
    return found


def crossing(width: int, depth: int, logit: float = 1000.0) -> Expected:
    """Returns the peak rate at which the largest logit of a run of the default recipe ends at `logit`."""
    rates = np.exp(np.linspace(math.log(0.003), math.log(0.3), 461))
    base = RunConfig()
    model = dataclasses.replace(base.model, d_model=width, n_layers=depth, n_heads=width // 16, head_dim=16)
    ends = [
        at_end(dataclasses.replace(base, model=model, optim=dataclasses.replace(base.optim, lr=float(rate))))
        for rate in rates
    ]

    def first(values: Sequence[float]) -> float:
        return float(next((rate for rate, z in zip(rates, values) if z > logit), math.inf))

    return Expected(
        value=first([z.value for z in ends]), low=first([z.high for z in ends]), high=first([z.low for z in ends])
    )


def measured_crossing(cells: Cells, width: int, depth: int, logit: float = 1000.0) -> float | None:
    """Returns the rate at which it was passed, between two measured rates on a straight line of logarithms; None where
    it is not between two."""
    ends = {
        runs[0].config.optim.lr: measured(runs)
        for runs in cells.values()
        if (runs[0].config.model.d_model, runs[0].config.model.n_layers) == (width, depth)
        and recipe(runs[0].config) == recipe(RunConfig())
    }
    wanted = math.log(logit)
    for (a, low), (b, high) in zip(sorted(ends.items()), sorted(ends.items())[1:]):
        if low <= wanted < high:
            return a * (b / a) ** ((wanted - low) / (high - low))
    return None


# The page.


def law_text() -> str:
    """Returns the frozen law with its numbers, and the forms that were tried."""
    law = evidence()["law"]
    terms = [f"{c:+.3f}{'·' if name else ''}{'·'.join(name)}" for name, c in law["coefficients"].items()]
    bands = ["up to 0.02", "0.02 to 0.05", "above 0.05"]
    widths = [f"| {said} | ± {a:.2f} | ± {b:.2f} |" for said, (a, b) in zip(bands, law["half_widths"])]
    a, p, q = evidence()["power_law"]
    tried = [f"| {name} | {error:.3f} |" for name, error in law["tried"].items()]
    return "\n".join(
        [
            f"Frozen form: {law['form']}. With s = ln Σ lr, w = ln(width / 64), l = ln(blocks / 2), d = ln(head / 16)",
            "and r = ln(peak rate / 0.03):",
            "",
            f"`ln z = {' '.join(terms)}`",
            "",
            "| peak rate | half width of the interval of ln z, inside of the fitted sizes | one doubling outside |",
            "|---|---|---|",
            *widths,
            "",
            f"The plain power law: `ln z = {a:+.3f} {p:+.3f}·ln Σ lr {q:+.3f}·ln N`, N = 12 · blocks · width².",
            "Wortsman's quadratic has three coefficients at each rate; all are in",
            "`experiments/predictions/evidence.json`.",
            "",
            "| form | root mean square error of ln z on width 128 and on 4 blocks, each left out |",
            "|---|---|",
            *tried,
        ]
    )


def predictions() -> str:
    """Returns the table of what is predicted of each cell of the test, from the frozen table alone."""
    configs = {run.role + str(run.config.optim.lr): run for run in HELD_OUT.plan(None, None).runs if run.name == "none"}
    lines = ["| cell | rate | largest logit at the end | power law | Wortsman's quadratic |", "|---|---|---|---|---|"]
    for run in configs.values():
        z, other = at_end(run.config), rivals(run.config)
        said = [f"{math.exp(other[name]):,.0f}" if name in other else "–" for name in RIVALS]
        lines.append(f"| {run.role} | {run.config.optim.lr:g} | {_number(z)} | {' | '.join(said)} |")
    lines.append("")
    for size in ((256, 2), (256, 8)):
        rate = crossing(*size)
        lines.append(
            f"Rate at which logits end at 1,000, width {size[0]}, {size[1]} blocks: {rate.value:.3f} "
            f"({rate.low:.3f} to {rate.high:.3f})."
        )
    return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> str:
    """Returns the results of the test in tables, and what follows from them."""
    cells = by_cell(rows)
    lines = ["| cell | rate | seeds | predicted | measured, mean of logarithms |", "|---|---|---|---|---|"]
    for runs in cells.values():
        config = runs[0].config
        size = f"width {config.model.d_model}, {config.model.n_layers} blocks"
        recipe_ = f"{config.optim.schedule}, {config.steps} steps | {config.optim.lr:g} | {len(runs)}"
        lines.append(f"| {size}, {recipe_} | {_number(at_end(config))} | {math.exp(measured(runs)):,.0f} |")
    lines += ["", "| interval of 90 % | covered | share |", "|---|---|---|"]
    held = coverage(rows)
    lines += [f"| {name} | {n} of {m} | {n / m:.0%} |" for name, (n, m) in held.items()]
    lines += [
        "",
        "| rival | cells | mean error of ln z, the law | the rival | difference (95 %) |",
        "|---|---|---|---|---|",
    ]
    effects = {name: against(cells, name) for name in RIVALS}
    for name, (own, other, effect) in effects.items():
        said = f"{effect.mean:+.2f} ({effect.low:+.2f} to {effect.high:+.2f})"
        lines.append(f"| {name} | {effect.n} | {own:.2f} | {other:.2f} | {said} |")
    lines.append("")
    rate, seen = crossing(256, 2), measured_crossing(cells, 256, 2)
    where = "not between two measured rates" if seen is None else f"measured {seen:.3f}"
    lines += [
        f"Rate at which logits end at 1,000 at width 256 and 2 blocks: predicted {rate.value:.3f} ({rate.low:.3f} to "
        f"{rate.high:.3f}), {where}.",
        "",
    ]
    return "\n".join([*lines, *_conclusions(held, effects)])


def _conclusions(
    held: Mapping[str, tuple[int, int]], effects: Mapping[str, tuple[float, float, PairedEffect]]
) -> list[str]:
    (n, m), *_ = held.values()
    logits = n / m >= COVERED
    lines = [
        f"- Intervals of logits cover {n / m:.0%} of the held-out runs: {_enough(logits)}, so the law is "
        f"{'not refuted' if logits else '**refuted**'} by its coverage.",
    ]
    words = {"better": "smaller", "worse": "larger", "undecided": "not shown to differ", "equal": "equal"}
    for name, (_, _, effect) in effects.items():
        said = words[effect.verdict]
        refuted = "" if effect.verdict == "better" else ": this part of the prediction is **refuted**"
        lines.append(f"- The mean error of the law against that of {name}: {said}{refuted}.")
    return lines


def _enough(holds: bool) -> str:
    return f"{'at least' if holds else 'less than'} the {COVERED:.0%} that was asked for"


def _number(z: Expected) -> str:
    return f"{z.value:,.0f} ({z.low:,.0f} to {z.high:,.0f})"


def chart(rows: Sequence[Row], fitted: Sequence[Row]) -> str:
    """Returns measured against predicted logits at the end of runs, both logarithmic: held out by size, others grey."""
    both = [
        (row, math.log10(at_end(row.config).value), math.log10(row.logits[-1]))
        for row in (*fitted, *rows)
        if row.config.remedy == "none"
    ]
    low, high = span(value for _, x, y in both for value in (x, y))
    axes = Axes(left=60, right=520, top=20, bottom=480, x=(low, high), y=(low, high))
    held = sorted({(row.config.model.d_model, row.config.model.n_layers) for row in rows})
    body = [f'<line x1="{axes.left}" y1="{axes.bottom}" x2="{axes.right}" y2="{axes.top}" stroke="#555"/>']
    for decade in range(low, high + 1):
        body.append(f'<text x="{axes.across(decade):.0f}" y="500" text-anchor="middle">{10**decade:,}</text>')
        body.append(f'<text x="52" y="{axes.up(decade) + 4:.0f}" text-anchor="end">{10**decade:,}</text>')
    own = set(map(id, rows))
    for row, x, y in both:
        size = (row.config.model.d_model, row.config.model.n_layers)
        colour = COLOURS[held.index(size) % len(COLOURS)] if id(row) in own else "#bbb"
        body.append(f'<circle cx="{axes.across(x):.1f}" cy="{axes.up(y):.1f}" r="3" fill="{colour}"/>')
    for i, (width, depth) in enumerate(held):
        body.append(f'<text x="540" y="{40 + 18 * i}" fill="{COLOURS[i]}">width {width}, {depth} blocks</text>')
    body.append('<text x="540" y="22" fill="#888">grey: fitted on</text>')
    body.append('<text x="290" y="520" text-anchor="middle">predicted largest logit at the end (nats)</text>')
    body.append('<text x="16" y="250" text-anchor="middle" transform="rotate(-90 16 250)">measured</text>')
    return picture(700, 530, "Largest logits, predicted and measured", "text{font:11px sans-serif}", "".join(body))


def written(page: str, part: str, text: str) -> str:
    """Returns the page with the text between the marks of this part."""
    begin, end = BEGIN.format(part), END.format(part)
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def page(text: str) -> str:
    """Returns the page with the tables that follow from the frozen table and, where it is there, from the test's."""
    text = written(written(text, "law", law_text()), "prediction", predictions())
    return written(text, "verdict", verdict(read_rows(TEST)) if TEST.exists() else "The test is not run yet.")


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(chart(read_rows(TEST) if TEST.exists() else [], read_rows(FIT)), encoding="utf-8")


if __name__ == "__main__":
    main()
