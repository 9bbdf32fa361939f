"""The pages of the predictions: the text that was registered, then results and verdicts from the committed tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predictions import after, edge_of_chaos, transfer
from predictions.charts import Axis, chart
from qkeel.metrics import PairedEffect

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "results"
Rows = Sequence[Mapping[str, Any]]
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def edge_page(about: Mapping[str, Any], rows: Rows) -> dict[str, str]:
    """Returns the files of the page of the edge of chaos by name."""
    found = edge_of_chaos.judged(rows)
    predicted = [(name, found[name]) for name, *_ in edge_of_chaos.PREDICTED]
    verdicts = [(f"{name}: {own['words']}", interval(own["value"]), f"**{own['verdict']}**") for name, own in predicted]
    cells = [
        (c["d_model"], f"`{c['remedy']}`", *(rate(c[k]) for k in ("edge", "knee", "logit"))) for c in found["cells"]
    ]
    text = "\n".join(
        (
            (HERE / "edge_of_chaos.md").read_text(encoding="utf-8"),
            "## Results\n",
            made(about, rows, found["seeds"]),
            table(("prediction", "found (95 %)", "verdict"), verdicts),
            "![Edge and knee of each remedy at each width](../images/edge-of-chaos.svg)\n",
            "![Exponent against rate at width 64](../images/edge-of-chaos-exponents.svg)\n",
            "Rates; ≤ or ≥ where it lies outside of the grid:\n",
            table(("width", "remedy", "edge", "knee", "largest logit passes 100"), cells),
            _after(rows),
            (HERE / "edge_of_chaos_reading.md").read_text(encoding="utf-8"),
        )
    )
    return {"edge-of-chaos.md": text, **_edge_pictures(found, rows)}


def _after(rows: Rows) -> str:
    statistics, (both, quiet, loud, neither) = after.looked_at(rows)
    return (
        "## Looked at afterwards\n\nNot predicted, so it suggests and tests nothing.\n\n"
        + table(("statistic", "found (95 %)"), [(words, interval(value)) for words, value in statistics])
        + f"\nOf {both + quiet + loud + neither} cells and rates {both + quiet} are chaotic, {both} of them with a "
        f"floor over {edge_of_chaos.FLOOR:g} nats; of the {loud + neither} others {loud} have one.\n"
    )


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


def transfer_page(about: Mapping[str, Any], rows: Rows) -> dict[str, str]:
    """Returns the files of the page of transfer by name."""
    found = transfer.judged(rows)
    verdicts = [(words, _value(found[name]["value"]), f"**{found[name]['verdict']}**") for name, words in WORDS.items()]
    proxies = sorted(found["right"], key=lambda size: (size[0] != "standard", size[1]))
    seeds = list(found["right"][proxies[0]])
    shares = [[f"{found['right'][size][n]:.0%}, {found['pairs'][size][n]:.0%}" for n in seeds] for size in proxies]
    right = [(_name(size), interval(found["tau"][size]), *own) for size, own in zip(proxies, shares)]
    text = "\n".join(
        (
            (HERE / "transfer.md").read_text(encoding="utf-8"),
            "## Results\n",
            made(about, rows, found["seeds"]),
            table(("prediction", "found (95 %)", "verdict"), verdicts),
            smallest(found, proxies, seeds),
            table(("proxy", "τ to the target", *(f"advice, pairs: {n} seed{'s' * (n > 1)}" for n in seeds)), right),
            "Mean held-out loss of `none` in nats per byte, and the others' gain over it, with 95 % intervals (Holm "
            "over the remedies of a size); in brackets the tuned rate:\n",
            table(*_gains(found, rows)),
            "![Gain over none by width](../images/transfer.svg)\n",
            _costs(found),
            (HERE / "transfer_reading.md").read_text(encoding="utf-8"),
        )
    )
    return {"transfer.md": text, "../images/transfer.svg": _transfer_picture(found)}


def smallest(found: Mapping[str, Any], proxies: Sequence[tuple[str, int]], seeds: Sequence[int]) -> str:
    """Returns the sentence about the smallest proxy whose advice is right in 90 % of draws."""
    good = [(n * size[1] ** 2, size, n) for size in proxies for n in seeds if found["right"][size][n] >= transfer.RIGHT]
    if not good:
        return "**No proxy's advice was right in 90 % of draws.**\n"
    _, size, n = min(good, key=lambda one: one[0])
    return (
        f"**The smallest proxy whose advice is right in 90 % of draws: {_name(size)} with {n} seed{'s' * (n > 1)}** "
        "(least width² × seeds).\n"
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


def _costs(found: Mapping[str, Any]) -> str:
    front = found["front"]
    lines = [(f"`{name}`", f"{cost:.2f}×", "yes" if name in front else "") for name, cost in found["cost"].items()]
    return (
        f"Of mean gain at width {transfer.TARGET} and CPU time, the remedies that no other beats in both are on the "
        "front. The time is the least of two stacks on a busy machine; differences under a fifth say nothing.\n\n"
        + table(("remedy", "CPU time of a run", "on the front"), lines)
    )


def _transfer_picture(found: Mapping[str, Any]) -> str:
    widths = sorted(size[1] for size in found["losses"] if size[0] == "standard")
    gains = {
        name: [(width, found["all_effects"]["standard", width][name].mean) for width in widths]
        for name in found["remedies"]
        if name != "none"
    }
    x = Axis(name="width", ticks=widths)
    y = Axis(name="gain over none at tuned rates, nats", ticks=(-0.1, -0.05, 0, 0.05), log=False)
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


def rate(value: float) -> str:
    """Returns a rate; half a step outside of the grid it is said to be outside.

    >>> rate(0.05), rate(0.012 * 2**-0.5)
    ('0.05', '≤ 0.012')
    """
    lrs = (0.012, 0.384)
    if value < lrs[0]:
        return f"≤ {lrs[0]:g}"
    return f"≥ {lrs[1]:g}" if value > lrs[1] else f"{value:.2g}"


def _value(value: float | Sequence[float]) -> str:
    return interval(value) if isinstance(value, Sequence) else f"{value:.0%} of draws"


def _name(size: tuple[str, int]) -> str:
    return f"width {size[1]}{', µP' if size[0] == 'mup' else ''}"


def write(out: Path, files: Mapping[str, str]) -> None:
    """Writes the files of a page below the folder of results."""
    for name, text in files.items():
        place = out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
