"""The autopilot on what it was not made on: held-out seeds, rates, widths, schedules, tasks and optimizers.

python -m experiments.autopilot run OUT.csv --seeds 40 41 42 43 [--settings wide muon]: trains what is missing in OUT,
seed by seed, a line a run, so that it can be stopped at any time and several may write parts of their own.
`page CSV ...` prints the page experiments/notes/autopilot.md from such files (experiments.autopilot_page). `mla
OUT.csv`
trains what the table of latent attention on that page compares, and prints the table.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import tempfile
import unittest.mock
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from experiments.autopilot_page import latent_table, page
from qkeel.autopilot import POLICIES, Action, Decision, Policy, Records
from qkeel.errors import QkeelWarning, RefusedError
from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig, run
from qkeel.metrics import COLLAPSE_ENTROPY, Row

OWN = "autopilot"
COLUMNS = ("setting", "lr", "seed", "remedy", "val_loss", "collapsed", "max_logit", "end_entropy", "collapse_step",
           "first_step", "actions", "cpu_seconds")  # fmt: skip
LALR, CLIP, AT_ONCE = "lalr:tau=0.1", "qk_clip:threshold=15", "autopilot:at_step="
MATCHED = f"{CLIP},steps=matched"
# Of the table of MLA; that of experiments/notes/autopilot.md has the first six, with the first policy.
LATENT = (LALR, f"{LALR}+{CLIP}", AT_ONCE + "3", OWN, "autopilot:patience=1", AT_ONCE + "5", "qk_norm", MATCHED)
Cell = tuple[str, float, int, str]  # a setting, a peak rate, a seed, a remedy
ALWAYS = ("none", "qk_norm", LALR, CLIP)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AtOnce(Policy):
    """Puts lalr and the clip on all heads at the first record from one step on, whatever the logits do."""

    name, line = "ladder", "both remedies on all heads at one step"  # in the place of the ladder, whose name runs take
    at_step: int

    def decide(self, records: Records) -> tuple[Decision, ...]:
        """The ladder's closer watching at first, then both remedies, once."""
        about = {"step": records.step, "rule": "a step", "reason": "the step is reached", "expected": "lower logits"}
        if len(records.history) == 1:
            return (Decision(action=Action.WATCH, remedy="watch:every=2", **about),)
        if records.step < self.at_step or len(records.decisions) > 1:
            return ()
        both = ((Action.CLIP, CLIP), (Action.RATES, LALR))
        return tuple(
            Decision(action=action, site=site.name, remedy=remedy, **about)
            for site in records.sites
            for action, remedy in both
        )


def cells(settings: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """Yields what is trained, seeds outermost, so that what is done when it is stopped is balanced."""
    for seed in seeds:
        for name in settings:
            for lr in SETTINGS[name].lrs:
                for remedy in (*ALWAYS, *SETTINGS[name].more, OWN):
                    yield name, lr, seed, remedy


def train(name: str, lr: float, seed: int, remedy: str, steps: int | None = None) -> Row:
    """Trains one run and returns its line; of a remedy that refuses the model it says so and has no numbers."""
    config = dataclasses.replace(SETTINGS[name].config, seed=seed)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=lr), steps=steps or config.steps)
    row: Row = {"setting": name, "lr": lr, "seed": seed, "remedy": remedy}
    swapped = unittest.mock.patch.dict(POLICIES, {"ladder": AtOnce} if remedy.startswith(AT_ONCE) else {})
    with swapped, tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", QkeelWarning)
        try:
            done = run(dataclasses.replace(config, remedy=remedy), place)
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


def measure(out: Path, wanted: Iterable[Cell], *, steps: int | None = None) -> None:
    """Trains what the file lacks, and adds a line after each run."""
    done = set()
    if out.exists():
        with out.open(encoding="utf-8", newline="") as file:
            done = {(r["setting"], float(r["lr"]), int(r["seed"]), r["remedy"]) for r in csv.DictReader(file)}
    with out.open("a", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for cell in wanted:
            if cell not in done:
                writer.writerow(train(*cell, steps=steps))
                file.flush()


def latent(out: Path, seeds: Sequence[int]) -> str:
    """Trains latent attention at the rate of 0.1 under the remedies of LATENT; returns their table."""
    measure(out, (("mla", 0.1, seed, remedy) for seed in seeds for remedy in LATENT))
    return latent_table(out, seeds)


def main() -> None:
    """Train, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="two steps of two settings, to show that it runs")
    what = parser.add_subparsers(dest="what")
    runs = what.add_parser("run")
    runs.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    for one in (runs, what.add_parser("mla")):
        one.add_argument("out", type=Path)
        one.add_argument("--seeds", type=int, nargs="+", default=[40, 41, 42, 43])
    what.add_parser("page").add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.what == "page":
        print(page(given.files), end="")
    elif given.what == "run":
        measure(given.out, cells(given.settings, given.seeds))
    elif given.what == "mla":
        print(latent(given.out, given.seeds))
    else:
        with tempfile.TemporaryDirectory() as place:
            measure(Path(place) / "toy.csv", cells(["gau"], [0, 1]), steps=2)
            print(page([Path(place) / "toy.csv"]), end="")


if __name__ == "__main__":
    main()
