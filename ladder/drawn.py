"""The autopilot's drawn test: 40 settings at random from a stated space, two seeds each, the policy frozen as it is.

    python -m ladder.drawn run [--idle] [--work FOLDER] [--results FOLDER]    what is left; stops and goes on as the
                                                                              ladder does
    python -m ladder.drawn judge    writes what the rows say into research/autopilot-drawn.md, by the rule that stands
                                    here

Everything here was committed before the first of its runs, and the settings are drawn by numpy from a seed: nothing was
chosen. Whatever comes out stands. Foreign models are not in the space, for the lab does not train them, nor is SGD, of
which no tuned rate is known.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmarks.autopilot_page import share_interval

from ladder.rows import RESULTS, Row, append, number, read
from ladder.run import Stop, check_text, step_aside
from qkeel.errors import RefusedError
from qkeel.lab.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.train_runs import run
from qkeel.metrics import exact_interval
from qkeel.records import read_json, write_json, write_text
from qkeel.records.run_directory import made_on

PAGE = Path(__file__).parents[1] / "research" / "autopilot-drawn.md"
DRAW, FILE = RESULTS / "drawn-settings.json", "drawn"
SEED, SETTINGS, SEEDS = 20261123, 40, (6000, 6001)
ARMS = ("none", "frozen_qk", "qk_norm", "lalr:tau=0.1", "qk_clip:threshold=15", "autopilot")
RIVALS = ARMS[2:5]  # remedies that are always on
# The best rate of the transfer study, and that of Muon on the second test's grid, each for a width of 64.
TUNED = {"adamw": 0.012, "muon": 0.02}
MARGIN, KEPT = 0.02, 0.9
BANDS = ((0.3, 1.0), (1.0, 3.16), (3.16, 10.0))


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """One setting; the rate is a multiple of the tuned one, log-uniform from 0.3 to 10."""
    optimizer = str(rng.choice(["adamw", "muon"], p=[0.7, 0.3]))
    width, times = int(rng.choice([32, 48, 64, 96, 128])), float(10 ** rng.uniform(math.log10(0.3), 1.0))
    return {
        "width": width,
        "blocks": int(rng.integers(1, 7)),
        "block": str(rng.choice(["mha", "mla", "gau"], p=[0.7, 0.15, 0.15])),
        "context": int(rng.choice([16, 32, 64, 128])),
        "batch": int(rng.choice([4, 8, 16])),
        "text": str(rng.choice(["stdlib", "topics"], p=[0.7, 0.3])),
        "optimizer": optimizer,
        "schedule": str(rng.choice(["constant", "cosine", "wsd"])),
        "weight_decay": float(rng.choice([0.0, 0.1])),
        "warmup": float(rng.choice([0.0, 0.1])),
        "beta2": float(rng.choice([0.95, 0.99])),
        "steps": int(rng.choice([100, 200, 300])),
        "times": round(times, 3),
        "lr": float(f"{TUNED[optimizer] * 64 / width * times:.3g}"),
    }


def drawn() -> list[dict[str, Any]]:
    """All settings, in the order in which they are run."""
    rng = np.random.default_rng(SEED)
    return [draw(rng) for _ in range(SETTINGS)]


def config(setting: Mapping[str, Any], arm: str, seed: int) -> RunConfig:
    """The configuration of one run."""
    block: Literal["mha", "mla", "gau"] = setting["block"]
    heads = 1 if block == "gau" else setting["width"] // 16
    return RunConfig(
        model=ModelConfig(d_model=setting["width"], n_layers=setting["blocks"], n_heads=heads, block=block),
        data=DataConfig(source=setting["text"], context=setting["context"], batch=setting["batch"]),
        optim=OptimConfig(
            name=setting["optimizer"],
            lr=setting["lr"],
            schedule=setting["schedule"],
            weight_decay=setting["weight_decay"],
            warmup=setting["warmup"],
            beta2=setting["beta2"],
        ),
        remedy=arm,
        seed=seed,
        steps=setting["steps"],
        log_every=10,
        eval_sequences=128,
        checkpoint_every=0,
        device="cpu",
        dtype="fp32",
    )


def row_of(i: int, setting: Mapping[str, Any], arm: str, seed: int, place: Path) -> Row:
    """Trains one run, and returns its line; of a remedy that refuses the model the line has no loss."""
    about = {"setting": i, "arm": arm, "seed": seed, "commit": made_on().get("commit", "")}
    try:
        done = run(config(setting, arm, seed), place, command="python -m ladder.drawn run")
    except RefusedError as error:
        return {**about, "refused": str(error)[:120], "val_loss": None, "collapsed": None, "touched": None}
    found = done.summary()
    acts = [e for e in done.events() if e.get("event") == "decision" and e.get("action") != "watch_closer"]
    return {
        **about,
        **{name: number(found[name]) for name in ("val_loss", "init_loss", "max_abs_logit", "end_entropy")},
        "collapsed": found["collapsed"],
        "touched": bool(acts),
        "cpu_seconds": found["cpu_seconds"],
        "cpu": done.env()["cpu"],
        "kernels": "compiled" if done.env()["compiled_kernels"] else "torch",
    }


def run_left(work: Path, results: Path, stop: Stop) -> None:
    """Runs what is left, both seeds of a setting one after the other."""
    done = {(r["setting"], r["arm"], r["seed"]) for r in read(FILE, results)}
    for i, setting in enumerate(read_json(DRAW)["settings"]):
        for seed in SEEDS:
            for arm in ARMS:
                if stop.asked:
                    return
                if (i, arm, seed) not in done:
                    place = work / FILE / f"{i}-{arm.partition(':')[0]}-{seed}"
                    append(FILE, [row_of(i, setting, arm, seed, place)], results)
                    shutil.rmtree(place, ignore_errors=True)
        print(f"drawn: {i + 1} of {SETTINGS}", flush=True)


def gap(rows: Sequence[Row]) -> float | None:
    """The autopilot's loss less that of the remedy that is best on the *other* seed, in the mean of both seeds."""
    losses = {(r["arm"], r["seed"]): r["val_loss"] for r in rows if r["val_loss"] is not None}
    gaps = []
    for seed, other in (SEEDS, SEEDS[::-1]):
        known = [arm for arm in RIVALS if (arm, other) in losses and (arm, seed) in losses]
        if known and ("autopilot", seed) in losses:
            best = min(known, key=lambda arm: losses[arm, other])
            gaps.append(losses["autopilot", seed] - losses[best, seed])
    return statistics.fmean(gaps) if len(gaps) == len(SEEDS) else None


def judge(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What came out. Read alike: a goal is reached if its whole interval of 95 % is within it, missed if none of it is.

    Kept: of the settings in which a run of none collapses those in which none of the autopilot's does; goal 90 %. Loss:
    the gaps of settings, by bands of the rate as a multiple of the tuned one; goal a mean under 0.02 in every band.
    Untouched: of the settings in which no run of none collapses those that were left alone; said, no goal.
    """
    by_setting = {i: [r for r in rows if r["setting"] == i] for i in range(len(settings))}
    whole = {i: own for i, own in by_setting.items() if len(own) == len(ARMS) * len(SEEDS)}
    lost = {arm: {i: any(r["collapsed"] for r in own if r["arm"] == arm) for i, own in whole.items()} for arm in ARMS}
    hot = [i for i in whole if lost["none"][i]]
    calm = [i for i in whole if not lost["none"][i]]
    untouched = [i for i in calm if not any(r["touched"] for r in whole[i] if r["arm"] == "autopilot")]
    found: dict[str, Any] = {
        "settings": len(whole),
        "kept": (sum(not lost["autopilot"][i] for i in hot), len(hot)),
        "untouched": (len(untouched), len(calm)),
    }
    for low, high in BANDS:
        gaps = [g for i, own in whole.items() if low <= settings[i]["times"] <= high and (g := gap(own)) is not None]
        if len(gaps) > 5:
            found[f"loss, {low:g} to {high:g} times the tuned rate"] = (
                len(gaps), statistics.fmean(gaps), *exact_interval(gaps, 0.95)
            )  # fmt: skip
    return found


_HEAD = """# The autopilot on settings drawn at random

The policy of the [autopilot](../docs/guides/autopilot.md) was frozen and tested once on {settings} settings, which
numpy drew from a stated space with seed {seed}. Each was trained on two seeds with six arms: {runs} runs. The draw, the
arms and the rule below were committed before the first of these runs, in `ladder/drawn.py`.

```sh
python -m ladder.drawn run
python -m ladder.drawn judge
```

**What was known before.** The [second test](autopilot.md) and its audit: at rates between healthy and collapsing the
autopilot had done nothing and had ended 0.051 nats (0.001 to 0.100) behind QK-norm. A trial of this program had shown
14 rows of settings 0 and 1; nothing was changed after it.

**The space.** Width 32, 48, 64, 96 or 128; 1 to 6 blocks; MHA (70 %), MLA or GAU; context 16 to 128, batch 4 to 16; two
texts; AdamW (70 %) or Muon; constant, cosine or WSD; weight decay 0 or 0.1; warm-up 0 or 0.1; β₂ 0.95 or 0.99; 100 to
300 steps. The peak rate is 0.3 to 10 times 0.012 · 64 / width (Muon: 0.02 · 64 / width), log-uniform. Models that the
lab does not train, and SGD, are outside.

**The rule.** A run has collapsed when its mean attention entropy ends under 0.1 nats, or its loss did not improve. A
setting collapses if one of its two runs without a remedy does; it is kept if neither run with the autopilot does. The
*gap* of a setting is the loss of the autopilot less that of the rival, in the mean of both seeds; the rival on one seed
is the always-on remedy (`qk_norm`, `lalr:tau=0.1`, `qk_clip:threshold=15`) that is best on the other seed. Each goal is
read alike: reached if all of its 95 % interval is within it, missed if none of it is, else not decided. Intervals
of shares are exact binomial ones (Clopper and Pearson), those of means are by subset means (Hartigan), over settings.
"""


def goals(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each goal."""
    yield "| goal | figure | 95 % interval | reached |"
    yield "|---|---|---|---|"
    for name, goal, text in (
        ("kept", KEPT, f"at least {KEPT:.0%} of the settings that collapse are kept from it"),
        ("untouched", None, "settings that do not collapse are untouched (no goal)"),
    ):
        k, n = found[name]
        low, high = share_interval(k, n)
        read_as = "" if goal is None else "yes" if low >= goal else "**no**" if high < goal else "not decided"
        yield f"| {text} | {k} of {n} | {low:.0%} to {high:.0%} | {read_as} |"
    for low_rate, high_rate in BANDS:
        own = found.get(f"loss, {low_rate:g} to {high_rate:g} times the tuned rate")
        if own is not None:
            n, mean, low, high = own
            read_as = "yes" if high <= MARGIN else "**no**" if low > MARGIN else "not decided"
            at = f"{low_rate:g} to {high_rate:g} times the tuned rate"
            yield (
                f"| the gap is at most {MARGIN:g} at {at} | {mean:+.3f} over {n} settings | "
                f"{low:+.3f} to {high:+.3f} | {read_as} |"
            )


def bands(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The loss of each arm less that of none, of frozen_qk and of qk_norm, by the band of the rate."""
    losses = {(r["setting"], r["arm"], r["seed"]): r["val_loss"] for r in rows if r["val_loss"] is not None}
    yield "| times the tuned rate | less | " + " | ".join(arm for arm in ARMS[2:]) + " |"
    yield "|---|---|" + "---|" * len(ARMS[2:])
    for low, high in BANDS:
        inside = [i for i, setting in enumerate(settings) if low <= setting["times"] <= high]
        for base in ARMS[:3]:
            cells = []
            for arm in ARMS[2:]:
                pairs = [[(losses.get((i, arm, s)), losses.get((i, base, s))) for s in SEEDS] for i in inside]
                gains = [
                    statistics.fmean(a - b for a, b in own if a is not None and b is not None)
                    for own in pairs
                    if all(None not in pair for pair in own)
                ]
                if len(gains) > 5 and arm != base:
                    least, most = exact_interval(gains, 0.95)
                    cells.append(f"{statistics.fmean(gains):+.3f} ({least:+.3f} to {most:+.3f}), {len(gains)}")
                else:
                    cells.append("")
            yield f"| {low:g} to {high:g} | {base} | {' | '.join(cells)} |"


def each_setting(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each setting, by the multiple of the tuned rate."""
    yield "| setting | times | collapsed of 2: none, autopilot | touched of 2 | " + " | ".join(ARMS) + " | gap |"
    yield "|---|---|---|---|" + "---|" * len(ARMS) + "---|"
    for i, s in sorted(enumerate(settings), key=lambda of: of[1]["times"]):
        own = [r for r in rows if r["setting"] == i]
        cells = []
        for arm in ARMS:
            mine = [r for r in own if r["arm"] == arm]
            known = [r["val_loss"] for r in mine if r["val_loss"] is not None]
            mark = "\\*" if any(r["collapsed"] for r in mine) else ""
            refused = "refused" if any(r.get("refused") for r in mine) else "–"
            cells.append(f"{statistics.fmean(known):.3f}{mark}" if known else refused)
        lost = {arm: sum(bool(r["collapsed"]) for r in own if r["arm"] == arm) for arm in ("none", "autopilot")}
        touched = sum(bool(r["touched"]) for r in own if r["arm"] == "autopilot")
        behind = gap(own)
        words = (
            f"{i}: {s['block']} {s['width']} × {s['blocks']}, {s['text']}, {s['optimizer']}, {s['schedule']}, "
            f"context {s['context']}, batch {s['batch']}, {s['steps']} steps, decay {s['weight_decay']:g}, "
            f"warm-up {s['warmup']:g}, β₂ {s['beta2']:g}"
        )
        yield (
            f"| {words} | {s['times']:.2f} | {lost['none']}, {lost['autopilot']} | {touched} | {' | '.join(cells)} | "
            f"{'–' if behind is None else f'{behind:+.3f}'} |"
        )


def page(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> str:
    """The text of research/autopilot-drawn.md."""
    done, total = len(rows), len(settings) * len(ARMS) * len(SEEDS)
    made = ", ".join(sorted({f"commit {r['commit']}, {r['cpu']}, {r['kernels']} kernels" for r in rows if "cpu" in r}))
    hours = sum(r["cpu_seconds"] for r in rows if "cpu_seconds" in r) / 3600
    lines = [
        _HEAD.format(settings=len(settings), seed=SEED, runs=total),
        f"{'All' if done == total else done} of {total} runs are done ({made}; {hours:.1f} core-hours).",
        *("", "## Goals", "", *goals(judge(rows, settings)), ""),
        *("## Losses by rate", ""),
        "Held-out loss of an arm less that of `none`, of `frozen_qk`, whose query and key weights keep their first",
        "values, and of `qk_norm`: the mean over settings of the mean of both seeds, its 95 % interval, and the number",
        "of settings.",
        *("", *bands(rows, settings), ""),
        *("## Each setting", ""),
        "Mean held-out loss of both seeds, in nats; \\* marks an arm of which a run collapsed.",
        *("", *each_setting(rows, settings), ""),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left, or judges what is there."""
    parser = argparse.ArgumentParser(prog="python -m ladder.drawn", description=__doc__)
    parser.add_argument("what", choices=["run", "judge", "draw"])
    parser.add_argument("--work", type=Path, default=Path("runs/ladder"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--idle", action="store_true", help="run only when no other process wants the processor")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.what == "draw":
        write_json(DRAW, {"seed": SEED, "settings": drawn()})
    elif options.what == "run":
        check_text("0.13M")
        if options.idle:
            step_aside()
        options.results.mkdir(parents=True, exist_ok=True)
        run_left(options.work, options.results, Stop())
    else:
        rows, settings = read(FILE, options.results), read_json(DRAW)["settings"]
        write_text(PAGE, page(rows, settings))
        for name, value in judge(rows, settings).items():
            print(name, value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
