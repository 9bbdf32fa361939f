"""The autopilot against none and against remedies that are always on, from the directory of a learning-rate study.

python -m benchmarks.autopilot STUDY: collapses, healthy runs touched, and held-out loss less that of each other remedy,
paired by seed, with its 95 % interval.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from qkeel.lab import DataConfig, ModelConfig, RunConfig
from qkeel.lab import study as made
from qkeel.metrics import paired_effect
from qkeel.records import RunDirectory

OWN = "autopilot"


def main() -> None:
    """Print the tables of the study that the command line names, or of a tiny one: --toy only shows that it runs."""
    if sys.argv[1:] != ["--toy"]:
        report(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as place:
        base = RunConfig(
            model=ModelConfig(d_model=16, n_heads=2), data=DataConfig(source="topics", context=8), steps=4, device="cpu"
        )
        made("lr", remedies=["none", OWN], lrs=[0.1], seeds=[0, 1], out=Path(place) / "study", base=base)
        report(Path(place) / "study")


def report(study: Path) -> None:
    """Print the tables of one study."""
    with (study / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    loss = {(r["remedy"], float(r["lr"]), int(r["seed"])): float(r["val_loss"]) for r in rows}
    collapsed = {key: r["collapsed"].lower() in ("true", "1") for key, r in zip(loss, rows, strict=True)}
    remedies = list(dict.fromkeys(remedy for remedy, _, _ in loss))
    rates, seeds = sorted({lr for _, lr, _ in loss}), sorted({seed for _, _, seed in loss})
    acted: dict[tuple[float, int], list[int]] = defaultdict(list)
    for row in rows:
        if row["remedy"] == OWN:
            events = RunDirectory(study / "runs" / row["run_id"]).events()
            changes = [e for e in events if e["event"] == "decision" and e["action"] != "watch_closer"]
            acted[float(row["lr"]), int(row["seed"])] = [int(e["step"]) for e in changes]
    print("collapsed:", {r: f"{sum(v for k, v in collapsed.items() if k[0] == r)}/{len(rates) * len(seeds)}"
                         for r in remedies})  # fmt: skip
    bad = [(lr, seed) for lr in rates for seed in seeds if collapsed["none", lr, seed]]
    kept = [key for key in bad if not collapsed[(OWN, *key)]]
    print(f"of {len(bad)} runs that collapse without a remedy {len(kept)} are kept from it")
    healthy = [(lr, seed) for lr in rates for seed in seeds if not collapsed["none", lr, seed]]
    touched = [key for key in healthy if acted[key]]
    print(f"of {len(healthy)} others {len(touched)} are touched: {touched}")
    for key in touched:
        print(f"  {key}: loss {loss[(OWN, *key)] - loss[('none', *key)]:+.4f} over none, first at step {acted[key][0]}")
    print("lr: loss of the autopilot less that of each, mean and 95 % interval over seeds; best always on")
    for lr in rates:
        words = []
        for other in [r for r in remedies if r != OWN]:
            gap = paired_effect([loss[OWN, lr, seed] - loss[other, lr, seed] for seed in seeds])
            words.append(f"{other} {gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]")
        print(f"  {lr:g}: " + "; ".join(words) + f"; first actions at {[acted[lr, s][:1] for s in seeds]}")


if __name__ == "__main__":
    main()
