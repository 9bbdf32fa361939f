"""Study and run directories with made-up numbers of the size that real ones have, written through `records`."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from qkeel.metrics import collapsed
from qkeel.records import RunDirectory, append_line, read_json, write_json, write_text

REMEDIES = (
    "none",
    "qk_norm",
    "lalr:tau=0.1",
    "qk_lr:factor=0.1",
    "softcap:cap=50",
    "qk_clip:threshold=30",
)
LRS = (0.01, 0.03, 0.1)
# by remedy: largest logit, entropy, held-out loss at the three LRs
TABLE = {
    "none": ((34.6, 1.02, 2.370), (122, 0.53, 2.463), (10_800, 0.03, 2.827)),
    "qk_norm": ((6.6, 1.63, 2.369), (10.1, 1.44, 2.411), (24.9, 1.05, 2.537)),
    "lalr:tau=0.1": ((9.2, 2.03, 2.430), (13.2, 1.80, 2.433), (19.7, 1.04, 2.634)),
    "qk_lr:factor=0.1": ((9.2, 2.02, 2.430), (13.4, 1.79, 2.432), (20.9, 1.01, 2.638)),
    "softcap:cap=50": ((29.8, 1.04, 2.371), (70.0, 0.59, 2.458), (260, 1.03, 2.716)),
    "qk_clip:threshold=30": (
        (29.0, 1.03, 2.369),
        (34.2, 0.73, 2.445),
        (50.2, 0.60, 2.717),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What a made-up run ends at."""

    remedy: str = "none"
    lr: float = 0.1
    seed: int = 0
    steps: int = 150
    every: int = 10
    max_logit: float = 10_800.0
    entropy: float = 0.03
    val_loss: float = 2.8
    init_loss: float = 5.553
    role: str = "grid"
    status: str = "done"
    layers: int = 2
    heads: int = 4

    @property
    def run_id(self):
        return f"{self.remedy.split(':')[0]}-{self.role}-{self.lr:g}-{self.seed}"


def make_run(path, made):
    """Write one run directory as the lab does."""
    path.mkdir(parents=True)
    write_json(path / "config.json", _config(made))
    write_json(path / "env.json", _env(made))
    for record in _records(made):
        append_line(path / "metrics.jsonl", record)
    if made.status == "done":
        RunDirectory(path).finish(_summary(made))
    elif made.status == "failed":
        text = 'Traceback (most recent call last):\n  File "train.py", line 12, in step\n    loss.backward()\n'
        write_text(
            path / "FAILED",
            text + "qkeel.errors.NonFiniteError: the loss is NaN at step 60 <&> stop\n",
        )
    return path


def make_study(path, runs, *, name="lr", absent=()):
    """Write a study directory; `absent` runs are planned but not there."""
    path.mkdir(parents=True)
    keys = ("run_id", "remedy", "lr", "seed", "role")
    planned = [{key: getattr(made, key) for key in keys} for made in (*runs, *absent)]
    about = {
        "study": name,
        "command": "qkeel study lr --lrs 0.01 0.03 0.1 --seeds 0 1 --out demo",
        "remedies": list(dict.fromkeys(run["remedy"] for run in planned)),
        "runs": planned,
    }
    write_json(path / "study.json", about)
    for made in runs:
        make_run(path / "runs" / made.run_id, made)
    return path


def grid(
    remedies=REMEDIES,
    lrs=LRS,
    seeds=(0, 1),
):
    """The grid of the demo."""
    runs = []
    for remedy in remedies:
        for lr, (logit, entropy, val_loss) in zip(LRS, TABLE[remedy]):
            for seed in seeds if lr in lrs else ():
                run = Made(remedy=remedy, lr=lr, seed=seed, entropy=entropy)
                off = 0.008 * (seed - 0.5) * (1 + 2 * (lr > 0.05))
                peak = logit * (1 + 0.1 * seed)
                runs.append(
                    dataclasses.replace(run, max_logit=peak, val_loss=val_loss + off)
                )
    return runs


def _config(made):
    return {
        "model": {
            "d_model": 64,
            "n_layers": made.layers,
            "n_heads": made.heads,
            "head_dim": 16,
            "context": 32,
        },
        "data": {"source": "stdlib", "batch": 8},
        "optim": {
            "name": "adamw",
            "lr": made.lr,
            "schedule": "constant",
            "warmup": 0.1,
            "grad_clip": 1.0,
        },
        "remedy": made.remedy,
        "seed": made.seed,
        "steps": made.steps,
    }


def _env(made):
    return {
        "qkeel": "0.1.0",
        "python": "3.12.3",
        "torch": "2.13.0+cpu",
        "device": "cpu",
        "dtype": "float32",
        "corpus": {"name": "stdlib", "sha256": "9f2c" * 16, "loss_unit": "byte"},
        "n_parameters": 131_456,
        "command": f"qkeel run --remedy {made.remedy} --lr {made.lr:g} --seed {made.seed}",
    }


def _records(made):
    """From a first logit of 0.6 towards the last one, loss and entropy along with it."""
    rng = np.random.default_rng([made.seed, int(made.lr * 1e4), len(made.remedy)])
    last = made.steps if made.status == "done" else 60
    records = []
    for step in range(0, last + 1, made.every):
        t = step / made.steps
        rise = 1 - math.exp(-5 * t) if t < 1 else 1.0
        wobble = 1 + 0.04 * rng.standard_normal() * (0 < t < 1)
        fall = (1 - math.exp(-9 * t)) / (1 - math.exp(-9))
        loss = made.init_loss + (made.val_loss - made.init_loss) * fall
        entropy = 2.4 + (made.entropy - 2.4) * min(1.0, 1.15 * rise)
        train_loss = loss + 0.05 * rng.standard_normal()
        records.append(
            {
                "step": step,
                "lr": made.lr,
                "train_loss": train_loss if step else None,
                "val_loss": loss if step % (5 * made.every) == 0 else None,
                "max_logit": 0.6 * (made.max_logit / 0.6) ** rise * wobble,
                "entropy": max(0.0, entropy * wobble),
            }
        )
    return records


def _summary(made):
    return {
        "steps": made.steps,
        "val_loss": made.val_loss,
        "max_logit": made.max_logit,
        "end_entropy": made.entropy,
        "collapsed": collapsed(made.entropy, made.val_loss, made.init_loss),
        "init_loss": made.init_loss,
        "status": "done",
    }


PRIMARY = {
    "remedy": "qk_norm",
    "baseline": "none",
    "lr": 0.1,
    "expected": 0.1,
    "spread": 0.06,
    "source": "as on seeds 1000 to 1015",
}
FEW = (0, 1)  # seeds at the rates where nothing is decided


def planned(path, remedies=REMEDIES, seeds=8, **primary):
    """Write a study that names a primary comparison, with `seeds` seeds at its rate, in which gains differ."""
    runs = [*grid(remedies, (0.01, 0.03), FEW), *grid(remedies, (0.1,), range(seeds))]
    runs = [
        made
        if made.remedy == "none"
        else dataclasses.replace(
            made, val_loss=made.val_loss + 0.05 * math.sin(made.seed)
        )
        for made in runs
    ]
    make_study(path, runs, name="demo")
    about = read_json(path / "study.json")
    write_json(path / "study.json", {**about, "primary": {**PRIMARY, **primary}})
    return path
