"""The autopilot's drawn tests: 40 settings at random from a stated space, two seeds each, the policy frozen before.

    python -m experiments.ladder.drawn run [--draw 1|2] [--seed SEED …] [--idle] [--work FOLDER] [--results FOLDER]
        what is left; stops and goes on as the ladder does. Several processes can share a draw if each has its own seeds
        and folders; join their rows with `cat`.
    python -m experiments.ladder.drawn judge [--draw 1|2]    writes what the rows say into the draw's page, by the rule
    that stands
                                                 here

Everything about a draw was committed before the first of its runs, and the settings are drawn by numpy from a seed:
nothing was chosen. Whatever comes out stands. Foreign models are not in the space, for the lab does not train them, nor
is SGD, of which no tuned rate is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.stats import binomtest

from experiments.files import commit, read_json, write_json
from experiments.intervals import exact_interval
from experiments.ladder.rows import RESULTS, Row, append, number, read
from experiments.ladder.run import Stop, check_text, step_aside
from qkeel.errors import DataError, RefusedError
from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig, run

RESEARCH = Path(__file__).parents[1] / "notes"
SETTINGS, KEPT, MARGIN = 40, 0.9, 0.02
BANDS = ((0.3, 1.0), (1.0, 3.16), (3.16, 10.0))
ALWAYS_ON = ("qk_norm", "lalr:tau=0.1", "qk_clip:threshold=15")
MATCHED = "qk_clip:threshold=15,steps=matched"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One test: its settings, its seeds, the remedies that the autopilot is compared with, and its page."""

    number: int
    seed: int  #: of numpy's generator, which draws the settings
    seeds: tuple[int, int]  #: of the two runs of each setting
    rivals: tuple[str, ...]  #: remedies that are always on
    policy: str  #: which policy was frozen, for the page
    known: str  #: what was known when it was committed
    commit: str = ""  #: the commit whose policy was tested, if the policy has been replaced since

    @property
    def arms(self) -> tuple[str, ...]:
        """All runs of a setting."""
        return ("none", "frozen_qk", *self.rivals, "autopilot")

    @property
    def name(self) -> str:
        """The name of its files."""
        return "drawn" if self.number == 1 else f"drawn-{self.number}"

    @property
    def page(self) -> Path:
        """The page that `judge` writes."""
        return RESEARCH / f"autopilot-{self.name}.md"

    @property
    def settings_file(self) -> Path:
        """The settings, committed before the first run."""
        return RESULTS / f"{self.name}-settings.json"


DRAWS: Mapping[int, Draw] = {
    draw.number: draw
    for draw in (
        Draw(
            number=1,
            seed=20261123,
            seeds=(6000, 6001),
            rivals=ALWAYS_ON,
            policy="the first policy, which added lalr to a clip with full steps. It is no longer part of the package; "
            "the policy that replaced it has [its own test](autopilot-drawn-2.md)",
            commit="1ab047e3ca7b",
            known="The [second test](autopilot.md) and its audit: at rates between healthy and collapsing the\n"
            "autopilot had done nothing and had ended 0.051 nats (0.001 to 0.100) behind QK-norm. A trial run of this "
            "program had shown\n14 rows of settings 0 and 1; nothing was changed after it.",
        ),
        Draw(
            number=2,
            seed=20261128,
            seeds=(6100, 6101),
            rivals=(*ALWAYS_ON, MATCHED),
            policy="the present policy, which clips with matched steps from the moment a head is forecast to end above "
            "100",
            known="The [first draw](autopilot-drawn.md), in which the first policy was behind the best\n"
            "always-on remedy by 0.061 nats at 3.16 to 10 times the tuned rate. The present policy was chosen on seed "
            "6000 of that draw's\nsettings. None of this draw's seeds or settings had been run.",
        ),
    )
}
# The best rate of the transfer study, and that of Muon on the second test's grid, each for a width of 64.
TUNED = {"adamw": 0.012, "muon": 0.02}


def setting(rng: np.random.Generator) -> dict[str, Any]:
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


def drawn(test: Draw) -> list[dict[str, Any]]:
    """All settings of a test, in the order in which they are run."""
    rng = np.random.default_rng(test.seed)
    return [setting(rng) for _ in range(SETTINGS)]


def config(of: Mapping[str, Any], arm: str, seed: int) -> RunConfig:
    """The configuration of one run."""
    block: Literal["mha", "mla", "gau"] = of["block"]
    heads = 1 if block == "gau" else of["width"] // 16
    return RunConfig(
        model=ModelConfig(d_model=of["width"], n_layers=of["blocks"], n_heads=heads, block=block),
        data=DataConfig(source=of["text"], context=of["context"], batch=of["batch"]),
        optim=OptimConfig(
            name=of["optimizer"],
            lr=of["lr"],
            schedule=of["schedule"],
            weight_decay=of["weight_decay"],
            warmup=of["warmup"],
            beta2=of["beta2"],
        ),
        remedy=arm,
        seed=seed,
        steps=of["steps"],
        log_every=10,
        eval_sequences=128,
        checkpoint_every=0,
        device="cpu",
        dtype="fp32",
    )


def row_of(i: int, of: Mapping[str, Any], arm: str, seed: int, place: Path) -> Row:
    """Trains one run, and returns its line; of a remedy that refuses the model the line has no loss."""
    about = {"setting": i, "arm": arm, "seed": seed, "commit": commit()}
    try:
        done = run(config(of, arm, seed), place, command="python -m experiments.ladder.drawn run")
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


def run_left(test: Draw, work: Path, results: Path, stop: Stop, seeds: Sequence[int] = ()) -> None:
    """Runs what is left, both seeds of a setting one after the other, or only the seeds that are named."""
    if unknown := sorted(set(seeds).difference(test.seeds)):
        raise DataError(f"draw {test.number} has the seeds {test.seeds}, got {', '.join(map(str, unknown))}")
    done = {(r["setting"], r["arm"], r["seed"]) for r in read(test.name, results)}
    for i, of in enumerate(read_json(test.settings_file)["settings"]):
        for seed, arm in itertools.product(seeds or test.seeds, test.arms):
            if stop.asked:
                return
            if (i, arm, seed) not in done:
                place = work / test.name / f"{i}-{test.arms.index(arm)}-{seed}"
                append(test.name, [row_of(i, of, arm, seed, place)], results)
                shutil.rmtree(place, ignore_errors=True)
        print(f"{test.name}: {i + 1} of {SETTINGS}", flush=True)


def gap(test: Draw, rows: Sequence[Row]) -> float | None:
    """The autopilot's loss less that of the remedy that is best on the *other* seed, in the mean of both seeds."""
    losses = {(r["arm"], r["seed"]): r["val_loss"] for r in rows if r["val_loss"] is not None}
    gaps = []
    for seed, other in (test.seeds, test.seeds[::-1]):
        known = [arm for arm in test.rivals if (arm, other) in losses and (arm, seed) in losses]
        if known and ("autopilot", seed) in losses:
            best = min(known, key=lambda arm: losses[arm, other])
            gaps.append(losses["autopilot", seed] - losses[best, seed])
    return statistics.fmean(gaps) if len(gaps) == len(test.seeds) else None


def judge(test: Draw, rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What came out. Read alike: a goal is reached if its whole interval of 95 % is within it, missed if none of it is.

    Kept: of the settings in which a run of none collapses those in which none of the autopilot's does; goal 90 %. Loss:
    the gaps of settings, by bands of the rate as a multiple of the tuned one; goal a mean under 0.02 in every band.
    Untouched: of the settings in which no run of none collapses those that were left alone; said, no goal.
    """
    by_setting = {i: [r for r in rows if r["setting"] == i] for i in range(len(settings))}
    whole = {i: own for i, own in by_setting.items() if len(own) == len(test.arms) * len(test.seeds)}
    lost = {
        arm: {i: any(r["collapsed"] for r in own if r["arm"] == arm) for i, own in whole.items()} for arm in test.arms
    }
    hot = [i for i in whole if lost["none"][i]]
    calm = [i for i in whole if not lost["none"][i]]
    untouched = [i for i in calm if not any(r["touched"] for r in whole[i] if r["arm"] == "autopilot")]
    found: dict[str, Any] = {
        "settings": len(whole),
        "kept": (sum(not lost["autopilot"][i] for i in hot), len(hot)),
        "untouched": (len(untouched), len(calm)),
    }
    for low, high in BANDS:
        gaps = [
            g for i, own in whole.items() if low <= settings[i]["times"] <= high and (g := gap(test, own)) is not None
        ]
        if len(gaps) > 5:
            found[f"loss, {low:g} to {high:g} times the tuned rate"] = (
                len(gaps), statistics.fmean(gaps), *exact_interval(gaps, 0.95)
            )  # fmt: skip
    return found


_HEAD = """# The autopilot on settings drawn at random{title}

This page tests {policy}.

The policy of the [autopilot](../../docs/guides/autopilot.md) was frozen and tested once on {settings} settings, which
numpy drew from a stated space with seed {seed}. Each was trained on two seeds with {arms} arms: {runs} runs. The draw,
the arms and the rule below were committed before the first of these runs, in `experiments/ladder/drawn.py`.

```sh
{run}
python -m experiments.ladder.drawn judge --draw {number}
```

**What was known before.** {known}

**The space.** Width 32, 48, 64, 96 or 128; 1 to 6 blocks; MHA (70 %), MLA or GAU; context 16 to 128, batch 4 to 16; two
texts; AdamW (70 %) or Muon; constant, cosine or WSD; weight decay 0 or 0.1; warm-up 0 or 0.1; β₂ 0.95 or 0.99; 100 to
300 steps. The peak rate is 0.3 to 10 times 0.012 · 64 / width (Muon: 0.02 · 64 / width), log-uniform. Models that the
lab does not train, and SGD, are outside.

**The rule.** A run has collapsed when its mean attention entropy ends under 0.1 nats, or its loss did not improve. A
setting collapses if one of its two runs without a remedy does; it is kept if neither run with the autopilot does. The
*gap* of a setting is the loss of the autopilot less that of the rival, in the mean of both seeds; the rival on one seed
is the always-on remedy ({rivals}) that is best on the other seed. Each goal is
read alike: reached if all of its 95 % interval is within it, missed if none of it is, else not decided. Intervals
of shares are exact binomial ones (Clopper and Pearson), those of means are by subset means (Hartigan), over settings.
"""


def head(test: Draw, settings: int, runs: int) -> str:
    """What a page says before its results."""
    return _HEAD.format(
        title="" if test.number == 1 else ": second draw",
        policy=test.policy,
        settings=settings,
        seed=test.seed,
        arms=len(test.arms),
        runs=runs,
        run="python -m experiments.ladder.drawn run"
        + (f"  # at commit {test.commit}" if test.commit else f" --draw {test.number}"),
        number=test.number,
        known=test.known,
        rivals=", ".join(f"`{rival}`" for rival in test.rivals),
    )


def goals(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each goal."""
    yield "| goal | figure | 95 % interval | reached |"
    yield "|---|---|---|---|"
    for name, goal, text in (
        ("kept", KEPT, f"at least {KEPT:.0%} of the settings that collapse are kept from it"),
        ("untouched", None, "settings that do not collapse are untouched (no goal)"),
    ):
        k, n = found[name]
        low, high = binomtest(k, n).proportion_ci()  # exact: Clopper and Pearson 1934
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


def costs(test: Draw, rows: Sequence[Row]) -> str:
    """The processor time of each arm relative to that of none."""
    seconds = {(r["setting"], r["arm"], r["seed"]): r["cpu_seconds"] for r in rows if "cpu_seconds" in r}
    found = []
    for arm in test.arms[1:]:
        ratios = [
            x / seconds[i, "none", s] for (i, a, s), x in seconds.items() if a == arm and (i, "none", s) in seconds
        ]
        found += [f"`{arm}` {statistics.median(ratios):.2f}"] if ratios else []
    return ", ".join(found)


def bands(test: Draw, rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The loss of each arm less that of none, of frozen_qk and of qk_norm, by the band of the rate."""
    losses = {(r["setting"], r["arm"], r["seed"]): r["val_loss"] for r in rows if r["val_loss"] is not None}
    yield "| times the tuned rate | less | " + " | ".join(arm for arm in test.arms[2:]) + " |"
    yield "|---|---|" + "---|" * len(test.arms[2:])
    for low, high in BANDS:
        inside = [i for i, setting in enumerate(settings) if low <= setting["times"] <= high]
        for base in ("none", "frozen_qk", "qk_norm"):
            cells = []
            for arm in test.arms[2:]:
                pairs = [[(losses.get((i, arm, s)), losses.get((i, base, s))) for s in test.seeds] for i in inside]
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


def each_setting(test: Draw, rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each setting, by the multiple of the tuned rate."""
    yield "| setting | times | collapsed of 2: none, autopilot | touched of 2 | " + " | ".join(test.arms) + " | gap |"
    yield "|---|---|---|---|" + "---|" * len(test.arms) + "---|"
    for i, s in sorted(enumerate(settings), key=lambda of: of[1]["times"]):
        own = [r for r in rows if r["setting"] == i]
        cells = []
        for arm in test.arms:
            mine = [r for r in own if r["arm"] == arm]
            known = [r["val_loss"] for r in mine if r["val_loss"] is not None]
            mark = "\\*" if any(r["collapsed"] for r in mine) else ""
            refused = "refused" if any(r.get("refused") for r in mine) else "–"
            cells.append(f"{statistics.fmean(known):.3f}{mark}" if known else refused)
        lost = {arm: sum(bool(r["collapsed"]) for r in own if r["arm"] == arm) for arm in ("none", "autopilot")}
        touched = sum(bool(r["touched"]) for r in own if r["arm"] == "autopilot")
        behind = gap(test, own)
        words = (
            f"{i}: {s['block']} {s['width']} × {s['blocks']}, {s['text']}, {s['optimizer']}, {s['schedule']}, "
            f"context {s['context']}, batch {s['batch']}, {s['steps']} steps, decay {s['weight_decay']:g}, "
            f"warm-up {s['warmup']:g}, β₂ {s['beta2']:g}"
        )
        yield (
            f"| {words} | {s['times']:.2f} | {lost['none']}, {lost['autopilot']} | {touched} | {' | '.join(cells)} | "
            f"{'–' if behind is None else f'{behind:+.3f}'} |"
        )


def page(test: Draw, rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> str:
    """The text of a draw's page."""
    done, total = len(rows), len(settings) * len(test.arms) * len(test.seeds)
    made = ", ".join(sorted({f"commit {r['commit']}, {r['cpu']}, {r['kernels']} kernels" for r in rows if "cpu" in r}))
    hours = sum(r["cpu_seconds"] for r in rows if "cpu_seconds" in r) / 3600
    lines = [
        head(test, len(settings), total),
        f"{'All' if done == total else f'{done} of'} {total} runs are done ({made}; {hours:.1f} core-hours).",
        *("", "## Goals", "", *goals(judge(test, rows, settings)), ""),
        *(
            "## Processor time",
            "",
            f"Relative to the same run of `none`, in the median over runs: {costs(test, rows)}.",
            "",
        ),
        *("## Losses by rate", ""),
        "Held-out loss of an arm less that of `none`, of `frozen_qk`, whose query and key weights keep their first",
        "values, and of `qk_norm`: the mean over settings of the mean of both seeds, its 95 % interval, and the number",
        "of settings.",
        *("", *bands(test, rows, settings), ""),
        *("## Each setting", ""),
        "Mean held-out loss of both seeds, in nats; \\* marks an arm of which a run collapsed.",
        *("", *each_setting(test, rows, settings), ""),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left, or judges what is there."""
    parser = argparse.ArgumentParser(prog="python -m experiments.ladder.drawn", description=__doc__)
    parser.add_argument("what", choices=["run", "judge", "draw"])
    parser.add_argument(
        "--draw", type=int, choices=list(DRAWS), default=max(DRAWS), help="which draw (default: the last)"
    )
    parser.add_argument("--seed", nargs="*", type=int, default=(), help="only these seeds (default: both)")
    parser.add_argument("--work", type=Path, default=Path("runs/ladder"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--idle", action="store_true", help="run only when no other process wants the processor")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    test = DRAWS[options.draw]
    if options.what == "draw":
        write_json(test.settings_file, {"seed": test.seed, "settings": drawn(test)})
    elif options.what == "run":
        if test.commit:
            raise RefusedError(
                f"draw {test.number} tested a policy that has been replaced; to repeat it, check out {test.commit} and "
                "run python -m experiments.ladder.drawn run"
            )
        check_text("0.13M")
        if options.idle:
            step_aside()
        options.results.mkdir(parents=True, exist_ok=True)
        run_left(test, options.work, options.results, Stop(), options.seed)
    else:
        rows, settings = read(test.name, options.results), read_json(test.settings_file)["settings"]
        test.page.write_text(page(test, rows, settings), encoding="utf-8")
        for name, value in judge(test, rows, settings).items():
            print(name, value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
