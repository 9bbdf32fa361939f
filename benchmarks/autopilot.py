"""The autopilot on what it was not made on: held-out seeds, rates, widths, schedules, tasks and optimizers.

python -m benchmarks.autopilot run OUT.csv --seeds 40 41 42 43 [--settings wide muon]: trains what is missing in OUT,
seed by seed, a line a run, so that it can be stopped at any time and several may write parts of their own.
`page CSV ...` prints the page docs/autopilot-results.md from such files (benchmarks.autopilot_page).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.autopilot_page import page
from qkeel.errors import QkeelWarning, RefusedError
from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig, run
from qkeel.metrics import COLLAPSE_ENTROPY, Row

OWN = "autopilot"
ALWAYS = ("none", "qk_norm", "lalr:tau=0.1", "qk_clip:threshold=15")
COLUMNS = ("setting", "lr", "seed", "remedy", "val_loss", "collapsed", "max_logit", "end_entropy", "collapse_step",
           "first_step", "actions", "cpu_seconds")  # fmt: skip
_BASE = RunConfig(steps=100, log_every=2, eval_sequences=64, checkpoint_every=0, device="cpu", dtype="fp32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, at which peak rates, and what is on besides ALWAYS: the same remedies with other options."""

    config: RunConfig
    lrs: Sequence[float]
    more: Sequence[str] = ()


def _setting(*lrs: float, more: Sequence[str] = (), **parts: object) -> Setting:
    return Setting(config=dataclasses.replace(_BASE, **parts), lrs=lrs, more=more)


SETTINGS: dict[str, Setting] = {
    "text": _setting(0.01, 0.1, 0.3, steps=150, more=("qk_clip:threshold=30", "lalr:tau=0.3")),
    "wide": _setting(0.01, 0.1, model=ModelConfig(d_model=128, n_heads=8)),
    "constant": _setting(0.01, 0.1, optim=OptimConfig(schedule="constant")),
    "muon": _setting(0.01, 0.3, optim=OptimConfig(name="muon")),
    "mla": _setting(0.01, 0.1, model=ModelConfig(block="mla")),
    "gau": _setting(0.01, 0.1, model=ModelConfig(block="gau", n_heads=1)),
    "vision": _setting(0.003, 0.1, data=DataConfig(task="vision", context=17, batch=16)),
    "multimodal": _setting(0.01, 0.1, data=DataConfig(task="multimodal", context=96, batch=4)),
}


def cells(settings: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, float, int, str]]:
    """Yields what is trained, seeds outermost, so that what is done when it is stopped is balanced."""
    for seed in seeds:
        for name in settings:
            for lr in SETTINGS[name].lrs:
                for remedy in (*ALWAYS, *SETTINGS[name].more, OWN):
                    yield name, lr, seed, remedy


def train(name: str, lr: float, seed: int, remedy: str, steps: int | None = None) -> Row:
    """Trains one run and returns its line; of a remedy that refuses the model it says so and has no numbers."""
    config = SETTINGS[name].config
    optim = dataclasses.replace(config.optim, lr=lr)
    config = dataclasses.replace(config, optim=optim, seed=seed, remedy=remedy, steps=steps or config.steps)
    row: Row = {"setting": name, "lr": lr, "seed": seed, "remedy": remedy}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", QkeelWarning)
        try:
            done = run(config, place)
        except RefusedError:
            return {**row, "actions": "refused"}
        summary, metrics = done.summary(), list(done.metrics())
        acted = [e for e in done.events() if e["event"] == "decision" and e["action"] != "watch_closer"]
    low = [r["step"] for r in metrics if r["entropy"] is not None and r["entropy"] < COLLAPSE_ENTROPY]
    names = dict.fromkeys(("releases " if e["release"] else "") + str(e["action"]) for e in acted)
    return {
        **row,
        **{column: summary[column] for column in COLUMNS if column in summary and column not in row},
        "collapse_step": low[0] if low else "",
        "first_step": acted[0]["step"] if acted else "",
        "actions": " ".join(names),
    }


def measure(out: Path, settings: Sequence[str], seeds: Sequence[int], *, steps: int | None = None) -> None:
    """Trains what the file lacks, and adds a line after each run."""
    done = set()
    if out.exists():
        with out.open(encoding="utf-8", newline="") as file:
            done = {(r["setting"], float(r["lr"]), int(r["seed"]), r["remedy"]) for r in csv.DictReader(file)}
    with out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for cell in cells(settings, seeds):
            if cell not in done:
                writer.writerow(train(*cell, steps=steps))
                file.flush()


def main() -> None:
    """Train, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="two steps of two settings, to show that it runs")
    what = parser.add_subparsers(dest="what")
    runs = what.add_parser("run")
    runs.add_argument("out", type=Path)
    runs.add_argument("--seeds", type=int, nargs="+", default=[40, 41, 42, 43])
    runs.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    what.add_parser("page").add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.what == "page":
        print(page(given.files), end="")
    elif given.what == "run":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        measure(given.out, given.settings, given.seeds)
    else:
        with tempfile.TemporaryDirectory() as place:
            measure(Path(place) / "toy.csv", ["gau"], [0, 1], steps=2)
            print(page([Path(place) / "toy.csv"]), end="")


if __name__ == "__main__":
    main()
