"""The judgement of the second prediction of transfer: new seeds, more remedies, a wider target and other depths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.predictions.order import over_seeds, verdict
from experiments.predictions.transfer import RIGHT, TARGET, TUNING, Row, advice, losses, order
from experiments.predictions.transfer import judged as judged_first

SEEDS = range(8, 16)
OLD = ("qk_norm", "qkv_norm", "softcap:cap=50", "qk_clip:threshold=30", "lalr:tau=0.1", "sigmoid")
BLOCKS, WIDE = 2, 128
Tables = Mapping[tuple[str, int], np.ndarray]
Value = float | tuple[float, float, float]
# Of `predictions.transfer`, whose statistics are as they were.
FIRST = {
    "order": "τ of widths 32 and 64",
    "nearer": "τ of 32 and 64, minus τ of 16 and 64",
    "mup": "what µP adds to τ of 32 and 64",
    "advice": "that of width 32 is right at 64",
    "advice16": "that of width 16 is right at 64",
}


def seen_from(rows: Sequence[Row], how: str, width: int) -> Tables:
    """Returns held-out losses [remedies seeds] at two blocks by size, with this size in the place of the target; the
    sizes of narrower models, by `how` and width, are proxies of it."""
    tables = losses([row for row in rows if row["n_layers"] == BLOCKS])[2]
    proxies = {(f"{own} proxy", d): table for (own, d), table in tables.items() if d < width}
    return proxies | {("standard", TARGET): tables[how, width]}


def of_depth(rows: Sequence[Row], blocks: int) -> Tables:
    """Returns the losses at the target's width with so many blocks as a proxy, and those of the target."""
    kept = [row for row in rows if (row["parametrisation"], row["d_model"]) == ("standard", TARGET)]
    own = [row for row in kept if row["n_layers"] == blocks]
    target = losses([row for row in kept if row["n_layers"] == BLOCKS])[2]
    return {("depth", blocks): losses(own)[2]["standard", TARGET], ("standard", TARGET): target["standard", TARGET]}


def judged(rows: Sequence[Row]) -> list[tuple[str, str, Value, str]]:
    """Returns name, words, value (an interval, a share of draws or a number) and verdict of each prediction."""
    kept = [row for row in rows if row["seed"] in SEEDS or row["seed"] >= TUNING]
    first = judged_first([row for row in kept if row["n_layers"] == BLOCKS])
    found: list[tuple[str, str, Value, str]] = [
        (name, words, first[name]["value"], first[name]["verdict"]) for name, words in FIRST.items()
    ]
    better = sum(first["effects"][remedy].verdict == "better" for remedy in OLD)
    words = "old remedies that gain over none at width 64"
    found.append(("no gain", words, float(better), "refuted" if better else "held"))
    n = len(first["seeds"])
    wide, wide_mup = seen_from(kept, "standard", WIDE), seen_from(kept, "mup", WIDE)
    near, far, mup = ("standard proxy", 64), ("standard proxy", 32), ("mup proxy", 64)

    def of(name: str, words: str, statistic: Callable[[np.ndarray], float], level: float, above: bool = True) -> None:
        value = over_seeds(n, statistic)
        found.append((name, words, value, verdict(value, level, above)))

    of("order128", "τ of widths 64 and 128", lambda own: order(wide, near, own), 0.4)
    of("far128", "τ of widths 32 and 128", lambda own: order(wide, far, own), 0.2)
    for name, proxy in (("advice128", near), ("proxy128", far)):
        share = advice(wide, proxy, n)
        held = "held" if share >= RIGHT else "refuted"
        found.append((name, f"that of width {proxy[1]} is right at 128", share, held))
    words = "what µP adds to τ of 64 and 128"
    of("mup128", words, lambda own: order(wide_mup, mup, own) - order(wide, near, own), 0.2, above=False)
    for name, blocks in (("shallow", 1), ("deep", 4)):
        depth = of_depth(kept, blocks)
        words = f"τ of {blocks} block{'s' * (blocks > 1)} and {BLOCKS}, width {TARGET}"
        of(name, words, lambda own, d=depth, b=blocks: order(d, ("depth", b), own), 0.4)
    return found
