"""The pages of the predictions: the text that was registered, then results and verdicts from the committed tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.predictions import edge_again, edge_of_chaos, transfer, transfer_again
from experiments.predictions.charts import Axis, chart
from experiments.predictions.table import tables_of
from qkeel.metrics import PairedEffect

HERE = Path(__file__).parent
DOCS = HERE.parent / "notes" / "results"
Rows = Sequence[Mapping[str, Any]]
Table = tuple[Mapping[str, Any], Rows]  # what is said about rows, and the rows
Size = tuple[str, int]
Shares = Mapping[Size, Mapping[int, float]]
RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
HIGH = (0.048, 0.192)  # rates over the best one of none
NOT_RUN = "Its runs are not made yet.\n"
FIRST = tuple(name for name, *_ in edge_of_chaos.PREDICTED)


def _cells(rows: Rows) -> dict[str, Any]:
    """The seeds, and the rates of each cell over all of them, as `judged` has them, without its bootstrap."""
    table = edge_of_chaos.Table.of(rows)
    of = {"edge": edge_of_chaos.edges, "knee": edge_of_chaos.knees, "logit": edge_of_chaos.passes_logit}
    rates = {name: 2.0 ** rate(table, np.arange(len(table.seeds))) for name, rate in of.items()}
    cells = [
        {"d_model": d, "remedy": remedy, **{name: float(rate[i]) for name, rate in rates.items()}}
        for i, (d, remedy) in enumerate(table.cells)
    ]
    return {"seeds": list(table.seeds), "cells": cells}


def edge_page(first: Table, again: Table | None = None) -> dict[str, str]:
    """Returns the files of the page of the edge of chaos by name: of the first table its verdicts, of the second, which
    holds all cells and seeds, everything else; where it is not there, of the first."""
    found = edge_of_chaos.judged(first[1])
    verdicts = [(f"{name}: {found[name]['words']}", found[name]["value"], found[name]["verdict"]) for name in FIRST]
    rows = (again or first)[1]
    whole = _cells(rows)
    lrs = sorted({row["lr"] for row in rows})
    cells = [
        (c["d_model"], f"`{c['remedy']}`", *(rate(c[k], lrs) for k in ("edge", "knee", "logit")))
        for c in whole["cells"]
    ]
    text = "\n".join(
        (
            (HERE / "edge_of_chaos.md").read_text(encoding="utf-8"),
            "## Results\n",
            made(*first, found["seeds"]),
            judgements(verdicts),
            (HERE / "edge_again.md").read_text(encoding="utf-8"),
            "## Results of the second\n",
            _edge_again(first[1], *again) if again else NOT_RUN,
            "## All seeds\n",
            f"Edge, knee and rival on seeds {whole['seeds'][0]} to {whole['seeds'][-1]}.\n",
            "![Edge and knee of each remedy at each width](../images/edge-of-chaos.svg)\n",
            "![Exponent against rate at width 64](../images/edge-of-chaos-exponents.svg)\n",
            "Rates; ≤ or ≥ where it lies outside of the grid:\n",
            table(("width", "remedy", "edge", "knee", "largest logit passes 100"), cells),
            _loud(rows),
            (HERE / "edge_of_chaos_reading.md").read_text(encoding="utf-8"),
        )
    )
    return {"edge-of-chaos.md": text, **_edge_pictures(whole, rows)}


def _edge_again(first: Rows, about: Mapping[str, Any], rows: Rows) -> str:
    new = [row for row in rows if row["seed"] in edge_again.SEEDS]
    verdicts = [(f"{name}: {words}", value, said) for name, words, value, said in edge_again.judged(new)]
    return "\n".join((made(about, rows, edge_of_chaos.Table.of(new).seeds), judgements(verdicts), same(first, rows)))


def _loud(rows: Rows) -> str:
    both, quiet, loud, neither = edge_again.chaotic_and_loud(rows)
    return (
        f"Of {both + quiet + loud + neither} cells and rates {both + quiet} are chaotic, {both} of them with a floor "
        f"over {edge_of_chaos.FLOOR:g} nats; of the {loud + neither} others {loud} have one.\n"
    )


def same(first: Rows, again: Rows) -> str:
    """Returns how many rows of the first table the second, which was made anew, has with the same numbers."""
    names = ("remedy", "parametrisation", "n_layers", "d_model", "steps", "lr", "seed")
    numbers = [name for name in first[0] if name not in (*names, "cpu_seconds")]
    known = {tuple(row[name] for name in names): [row[name] for name in numbers] for row in again}
    both = [known[key] == [row[n] for n in numbers] for row in first if (key := tuple(row[n] for n in names)) in known]
    return f"Of the {len(both)} runs that both tables have, {sum(both)} have the same numbers in every digit.\n"


def _edge_pictures(found: Mapping[str, Any], rows: Rows) -> dict[str, str]:
    cells, curves = found["cells"], edge_of_chaos.Table.of(rows)
    remedies = dict.fromkeys(cell["remedy"] for cell in cells)
    places = {name: [(c["edge"], c["knee"]) for c in cells if c["remedy"] == name] for name in remedies}
    own = edge_of_chaos.exponents(curves, np.arange(len(curves.seeds)))
    lines = {remedy: list(zip(curves.lrs, map(float, own[i]))) for i, (d, remedy) in enumerate(curves.cells) if d == 64}
    first = chart(
        "The rate at which one ulp grows to the size of the logits, and that at which the loss rises",
        Axis(name="edge of chaos, learning rate", ticks=RATES),
        Axis(name="knee, learning rate", ticks=RATES),
        places,
        line=False,
    )
    second = chart(
        "Exponent of two runs one ulp apart, width 64",
        Axis(name="learning rate", ticks=RATES),
        Axis(name="median exponent per step", ticks=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)),
        lines,
    )
    return {"../images/edge-of-chaos.svg": first, "../images/edge-of-chaos-exponents.svg": second}


WORDS = {
    "order": "order: Kendall's τ of widths 32 and 64",
    "nearer": "nearer: τ of 32 and 64, minus τ of 16 and 64",
    "mup": "µP: what it adds to τ of 32 and 64",
    "advice": "advice: that of width 32 is right",
    "advice16": "advice16: that of width 16 is right",
}


def transfer_page(first: Table, again: Table | None = None) -> dict[str, str]:
    """Returns the files of the page of transfer by name: of the first table its verdicts, of the second, which holds
    all sizes and seeds, everything else; where it is not there, of the first."""
    found = transfer.judged(first[1])
    verdicts = [(words, found[name]["value"], found[name]["verdict"]) for name, words in WORDS.items()]
    rows = [row for row in (again or first)[1] if row["n_layers"] == transfer_again.BLOCKS]
    whole = transfer.judged(rows)
    text = "\n".join(
        (
            (HERE / "transfer.md").read_text(encoding="utf-8"),
            "## Results\n",
            made(*first, found["seeds"]),
            judgements(verdicts),
            (HERE / "transfer_again.md").read_text(encoding="utf-8"),
            "## Results of the second\n",
            _transfer_again(*again) if again else NOT_RUN,
            "## All seeds\n",
            f"Seeds {whole['seeds'][0]} to {whole['seeds'][-1]}. How often a proxy's advice is right, by the number of "
            "its seeds:\n",
            _shares("width 64", whole["right"], whole["tau"], whole["pairs"]),
            *([_shares("width 128", transfer_again.advice_at_wide(rows), {}, {})] if again else []),
            "Mean held-out loss of `none` in nats per byte, and the others' gain over it, with 95 % intervals (Holm "
            "over the remedies of a size); in brackets the tuned rate:\n",
            table(*_gains(whole, rows)),
            "![Gain over none by width](../images/transfer.svg)\n",
            _fronts(whole, tables_of("edge")[-1][1]),
            (HERE / "transfer_reading.md").read_text(encoding="utf-8"),
        )
    )
    return {"transfer.md": text, "../images/transfer.svg": _transfer_picture(whole)}


def _transfer_again(about: Mapping[str, Any], rows: Rows) -> str:
    verdicts = [
        (f"{name}: {words}", [value] if name == "no gain" else value, said)
        for name, words, value, said in transfer_again.judged(rows)
    ]
    return made(about, rows, transfer_again.SEEDS) + "\n" + judgements(verdicts)


def _shares(target: str, right: Shares, tau: Mapping[Size, Sequence[float]], pairs: Shares) -> str:
    """Returns how often the advice of each proxy is right for a target, and which is the smallest that is in RIGHT.

    Args:
        target: its name. right: shares of draws by proxy and number of seeds. tau: Kendall's τ to the target by proxy,
            or nothing. pairs: shares of pairs in the right order, as `right`, or nothing.
    """
    sizes = sorted(right, key=lambda size: (not size[0].startswith("standard"), size[1]))
    seeds = [f"{n} seed{'s' * (n > 1)}" for n in right[sizes[0]]]
    lines = [
        (
            _name(size),
            *([interval(tau[size])] if tau else []),
            *(f"{share:.0%}" + (f", {pairs[size][n]:.0%}" if pairs else "") for n, share in right[size].items()),
        )
        for size in sizes
    ]
    head = ("proxy", *(["τ to the target"] if tau else []), *((f"advice, pairs: {n}" if pairs else n) for n in seeds))
    return f"**{target}**: {smallest(right)}\n\n" + table(head, lines)


def smallest(right: Shares) -> str:
    """Returns the sentence about the smallest proxy whose advice is right in 90 % of draws."""
    good = [
        (n * size[1] ** 2, size, n)
        for size, own in right.items()
        for n, share in own.items()
        if share >= transfer.RIGHT
    ]
    if not good:
        return "no proxy's advice was right in 90 % of draws."
    _, size, n = min(good, key=lambda one: one[0])
    return (
        f"the smallest proxy whose advice is right in 90 % of draws is {_name(size)} with {n} seed{'s' * (n > 1)} "
        "(least width² × seeds)."
    )


def _gains(found: Mapping[str, Any], rows: Rows) -> tuple[list[str], list[list[str]]]:
    sizes = sorted(set(found["losses"]) - {("mup", transfer.TARGET)}, key=lambda size: (size[0] != "standard", size[1]))
    compared = [row for row in rows if row["seed"] < transfer.TUNING]
    rates = {(row["parametrisation"], row["d_model"], row["remedy"]): row["lr"] for row in compared}
    lines = []
    for i, remedy in enumerate(found["remedies"]):
        line = [f"`{remedy}`"]
        for size in sizes:
            effect = found["all_effects"][size].get(remedy)
            number = gain(effect) if effect else format(found["losses"][size][i], ".3f")
            line.append(f"{number} [{rates[*size, remedy]:g}]")
        lines.append(line)
    return ["remedy", *map(_name, sizes)], lines


def _fronts(found: Mapping[str, Any], edge: Rows) -> str:
    """Returns the gain over none at the tuned rate, and from the rows of the edge at higher ones, against the cost."""
    losses = {(r["remedy"], r["lr"], r["seed"]): r["val_loss"] for r in edge if r["d_model"] == transfer.TARGET}
    names, seeds = (list(dict.fromkeys(key[i] for key in losses)) for i in (0, 2))
    cost, columns = found["cost"], {"tuned rate": found["effects"]}
    for lr in HIGH:
        columns[f"rate {lr:g}"] = transfer.gains(names, np.array([[losses[n, lr, s] for s in seeds] for n in names]))
    known = {rate: {"none": 0.0, **{n: own[n].mean for n in own}} for rate, own in columns.items()}
    fronts = {rate: transfer.front({n: (mean, cost[n]) for n, mean in own.items()}) for rate, own in known.items()}
    lines = []
    for name in sorted(cost, key=cost.__getitem__):
        cells = [gain(own[name]) if name in own else "0" if name == "none" else "–" for own in columns.values()]
        marked = [f"**{cell}**" if name in fronts[rate] else cell for rate, cell in zip(columns, cells)]
        lines.append((f"`{name}`", f"{cost[name]:.2f}×", *marked))
    return (
        f"Gain over `none` at width {transfer.TARGET} in nats per byte, at each remedy's tuned rate and at two rates "
        "over it, against the processor time of a run. Bold are those that no other remedy beats in both: the Pareto "
        f"front. Gains at fixed rates are of the runs of the [edge of chaos](edge-of-chaos.md), {len(seeds)} seeds, "
        "Holm over the remedies of a rate. The time is the least of the stacks of this study on a busy machine; "
        "differences under a fifth say nothing.\n\n" + table(("remedy", "time", *columns), lines)
    )


def _transfer_picture(found: Mapping[str, Any]) -> str:
    widths = sorted(size[1] for size in found["losses"] if size[0] == "standard")
    gains = {
        name: [(width, found["all_effects"]["standard", width][name].mean) for width in widths]
        for name in found["remedies"]
        if name != "none"
    }
    x = Axis(name="width", ticks=widths)
    y = Axis(name="gain over none at tuned rates, nats", ticks=(-0.15, -0.1, -0.05, 0, 0.05, 0.1), log=False)
    return chart("Gain over none by width, standard parametrisation, tuned rates", x, y, gains)


def made(about: Mapping[str, Any], rows: Rows, seeds: Sequence[int]) -> str:
    """Returns what the rows were made by, and what was cut."""
    identity = about["identity"]
    return (
        f"{about['runs']:,} runs by `{about['command']}`, judged on seeds {seeds[0]} to {seeds[-1]}; 2 cores, torch "
        f"{identity['torch'].split('+')[0]}, {identity['cpu']}, compiled kernels "
        f"{'on' if identity['compiled_kernels'] else 'off'}; table `benchmarks/results/{about['file']}`. "
        f"{about['cut']}\n"
    )


def table(names: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    rows = [names, ["---"] * len(names), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def interval(value: Sequence[float]) -> str:
    """Returns a value with its interval."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*value).replace("-", "−")


def gain(effect: PairedEffect) -> str:
    """Returns a paired gain with its interval."""
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f})".replace("-", "−")


def rate(value: float, lrs: Sequence[float]) -> str:
    """Returns a rate; outside of the grid it is said to be outside.

    >>> rate(0.05, (0.012, 0.384)), rate(0.012 * 2**-0.5, (0.012, 0.384))
    ('0.05', '≤ 0.012')
    """
    if value < lrs[0]:
        return f"≤ {lrs[0]:g}"
    return f"≥ {lrs[-1]:g}" if value > lrs[-1] else f"{value:.2g}"


def judgements(found: Iterable[tuple[str, float | Sequence[float], str]]) -> str:
    """Returns predictions in words with what was found and the verdict."""
    return table(("prediction", "found (95 %)", "verdict"), [(w, _value(v), f"**{said}**") for w, v, said in found])


def _value(value: float | Sequence[float]) -> str:
    """Three numbers are a value and its interval, one a count; what stands by itself is a share."""
    if not isinstance(value, Sequence):
        return f"{value:.0%} of draws"
    return interval(value) if len(value) > 1 else f"{value[0]:.0f}"


def _name(size: tuple[str, int]) -> str:
    return f"width {size[1]}{', µP' if size[0].startswith('mup') else ''}"


def write(out: Path, files: Mapping[str, str]) -> None:
    """Writes the files of a page below the folder of results."""
    for name, text in files.items():
        place = out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
