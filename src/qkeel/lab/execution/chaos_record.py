"""The chaos.json of a chaos study: how far the two runs of each pair parted, and how fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qkeel.lab.plan import MOVED, UNMOVED
from qkeel.metrics import distance, divergence_rate
from qkeel.options import Json
from qkeel.records import RunDirectory, RunStatus, write_json

_LOGITS = ("max_logit", "min_logit")


def write_chaos(out: Path, about: Json) -> None:
    """Writes chaos.json where the study has pairs: the configuration they share, and one entry per finished pair.
    Pairs of a study in parts, as of several widths, share none; each names its part.

    The distance of a pair is that of the largest and smallest logit of every head on the probe, root mean square.
    """
    if not any(role.partition(", ")[0] == MOVED for role in about["base"]):
        return
    runs = {(e["role"], e["remedy"], e["lr"], e["seed"]): out / "runs" / e["run_id"] for e in about["runs"]}
    pairs = []
    for (role, *key), place in runs.items():
        own, _, part = role.partition(", ")
        other = runs.get((f"{MOVED}, {part}" if part else MOVED, *key))
        if own == UNMOVED and other is not None:
            both = RunDirectory(place), RunDirectory(other)
            if all(run.status is RunStatus.DONE for run in both):
                named = {**({"part": part} if part else {}), **dict(zip(("remedy", "lr", "seed"), key))}
                pairs.append({**named, **_parted(both)})
    write_json(out / "chaos.json", {"base": about["base"].get(UNMOVED, {}), "pairs": pairs})


def _parted(both: Sequence[RunDirectory]) -> Json:
    heads = [run.heads() for run in both]
    steps = min((own.steps for own in heads), key=len)  # one that diverges stops early
    courses = [np.stack([own.values[name][: len(steps)] for name in _LOGITS], axis=1) for own in heads]
    apart = distance(*courses)
    rate = divergence_rate(steps.tolist(), apart, distance(np.zeros_like(courses[0]), courses[0]))
    losses = [float(run.summary()["val_loss"]) for run in both]
    return {
        "loss_difference": abs(losses[1] - losses[0]),
        "logit_distance": float(apart[-1]),
        "exponent": None if math.isnan(rate) else rate,
    }
