"""Does the residual stream grow late in training, and is it the images that make it grow? (Chameleon, section 2.3)

    python -m experiments.multimodal_stream run --out ROWS    appends a row for each run that ROWS lacks
    python -m experiments.multimodal_stream table ROWS        writes the committed table
    python -m experiments.multimodal_stream page              writes the page's section from that table

The runs are those of `qkeel study multimodal`, watched with `stats="max+residual"`. Late growth is the root mean square
of what leaves the last block at the end of training over that in the middle.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import qkeel
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import with_values
from qkeel.lab.studies import CHAMELEON_34B, MULTIMODAL_BASE, mixed
from qkeel.lab.train import train_step
from qkeel.metrics import paired_effect

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "experiments" / "results" / "multimodal-stream-2026-11-26.json"
PAGE = ROOT / "experiments" / "notes" / "multimodal.md"
BEGIN, END = "<!-- experiments.multimodal_stream: begin -->", "<!-- experiments.multimodal_stream: end -->"
REMEDIES = {"none": "none", "qk_norm": "qk_norm", "swin_norm": "swin_norm", "Chameleon 34B": CHAMELEON_34B}
MIXES, LRS, SEEDS, EVERY = ("text", "mix"), (0.01, 0.1), range(6), 10  # of five, no exact interval of 95 % is finite
RMS, RATIO = "block_output_rms", "block_output_channel_ratio"

Row = dict[str, Any]
Key = tuple[str, str, float, int]


def train(remedy: str, mix: str, lr: float, seed: int, steps: int = MULTIMODAL_BASE.steps) -> Row:
    """One run: by measured step the largest logit, and the size and channel ratio of what leaves the last block."""
    base = with_values(MULTIMODAL_BASE, steps=steps, seed=seed, remedy=REMEDIES[remedy], optim={"lr": lr})
    state = RunState(resolve(mixed(base, mix)))
    with qkeel.watch(state.model, state.optimizer, every=EVERY, stats="max+residual", rules=()) as monitor:
        for step in range(steps):
            train_step(state, step)
    history = monitor.history  # with the end, which is measured when watching ends
    last = [history.values[f"{name}/{history.layers[-1]}"] for name in (RMS, RATIO)]
    logits = np.nanmax(history.heads["max_logit"], axis=(1, 2))
    courses = {"rms": last[0], "channel_ratio": last[1], "max_logit": logits}
    row: Row = {"remedy": remedy, "mix": mix, "lr": lr, "seed": seed, "steps": [int(x) for x in history.steps]}
    return row | {name: [float(f"{x:.5g}") for x in course] for name, course in courses.items()}


def key(row: Row) -> Key:
    """The run of a row."""
    return row["remedy"], row["mix"], row["lr"], row["seed"]


def late_growth(row: Row, name: str = "rms") -> float:
    """The natural logarithm of a number's value at the end over that at half of the steps."""
    half = int(np.argmin(np.abs(np.array(row["steps"]) - row["steps"][-1] / 2)))
    return math.log(row[name][-1] / row[name][half])


def growth(row: Row, name: str = "rms") -> float:
    """The natural logarithm of a number's value at the end over that before training."""
    return math.log(row[name][-1] / row[name][0])


def end(row: Row, name: str = "rms") -> float:
    """The natural logarithm of a number's value at the end."""
    return math.log(row[name][-1])


def ratio(values: Sequence[float]) -> str:
    """The geometric mean of ratios, given as logarithms, with its 95 % interval over seeds."""
    found = paired_effect(values)
    return f"{_number(math.exp(found.mean))} ({_number(math.exp(found.low))} to {_number(math.exp(found.high))})"


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def section(rows: Sequence[Row]) -> str:
    """The section of the page: late growth and size at the end, by remedy, mix and rate."""
    table = {key(row): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})

    def over(remedy: str, mix: str, lr: float, of: Callable[[Row], float]) -> list[float]:
        return [of(table[remedy, mix, lr, seed]) for seed in seeds]

    lines = [
        "| remedy | LR | stream, end over middle: text | … mix | mix over text, late growth | end over start: mix "
        "| stream at the end: mix over text | channel ratio at the end: mix |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for remedy in REMEDIES:
        for lr in LRS:
            text, mix = (over(remedy, one, lr, late_growth) for one in MIXES)
            ends = [over(remedy, one, lr, end) for one in MIXES]
            peaks = over(remedy, "mix", lr, lambda row: end(row, "channel_ratio"))
            whole = over(remedy, "mix", lr, growth)
            cells = (text, mix, [b - a for a, b in zip(text, mix)], whole, [b - a for a, b in zip(*ends)], peaks)
            lines.append(f"| {remedy} | {lr:g} | {' | '.join(map(ratio, cells))} |")
    return "\n".join(lines)


def read(path: Path) -> list[Row]:
    """The rows of a file of lines, or of the committed table."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text)["rows"] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def run(seeds: Sequence[int], out: Path) -> None:
    """Appends the rows that are not there yet."""
    known = {key(row) for row in read(out)} if out.exists() else set()
    for seed in seeds:
        for remedy in REMEDIES:
            for mix in MIXES:
                for lr in LRS:
                    if (remedy, mix, lr, seed) not in known:
                        row = train(remedy, mix, lr, seed)
                        with out.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row) + "\n")


def with_section(page: str, text: str) -> str:
    """The page with its section replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, or writes the table or the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.multimodal_stream", description=__doc__)
    parser.add_argument("what", choices=("run", "table", "page"))
    parser.add_argument("rows", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "run":
        run(options.seeds, options.out)
    elif options.what == "table":
        rows = sorted(read(options.rows), key=key)
        text = json.dumps({"command": "python -m experiments.multimodal_stream run", "rows": rows})
        TABLE.write_text(text.replace('{"remedy"', '\n{"remedy"') + "\n", encoding="utf-8")
    else:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(page, section(read(options.rows))), encoding="utf-8")


if __name__ == "__main__":
    main()
