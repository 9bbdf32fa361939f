"""The page experiments/notes/autopilot.md, from the lines that experiments.autopilot wrote; it adds nothing to them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from qkeel.metrics import paired_effect

OWN, NONE = "autopilot", "none"
MARGIN, WORSE = 0.02, 0.005  # nats a byte
NOT_TEXT = ("vision",)  # whose loss is nats an image, not a byte
Cell = tuple[str, float]  # a setting and a peak rate
Run = dict[str, str]

_HEAD = """# The second test of the autopilot

The command below writes this page from the recorded runs, and a test checks that it is up to date. The policy tested
here is the first one, which
added lalr to a clip with full steps; another has taken its place. Both were tested on settings drawn at random:
[the first](autopilot-drawn.md), [the present one](autopilot-drawn-2.md). What the autopilot does when:
[autopilot](../../docs/guides/autopilot.md).

```sh
{command}
```

{what}

**What was held out, and what was not.** The policy was frozen in a commit of its own before the first of these runs,
and nothing was chosen on their seeds. But its threshold of 15 was picked on these eight settings at the rates 0.1 and
0.3, on seeds 2 to 5, in that same commit. The settings are no test of it; the seeds are.

**The rate that was left out.** The first test (threshold 30, seeds 30 to 33, rates 0.003 to 0.3) missed the goal of
0.02 nats at rate 0.03 (+0.039, 0.011 to 0.068), at 0.1 and at 0.3. The threshold was changed, and this test has 0.01,
0.1 and 0.3, not 0.03. An audit ran that rate on three fresh seeds: the autopilot touched none of them and ended 0.051
nats (0.001 to 0.100) behind QK-norm. At rates between healthy and collapsing, the first policy did nothing, although
an always-on norm already gains there. The present policy acts there.

**What it costs.** In the median over settings and seeds the same run took {cost} times the processor time of none
({others}).

A run has collapsed when its mean attention entropy ends under 0.1 nats, or its loss did not improve. Intervals are of
95 %: of shares exact binomial ones, of losses by `qkeel.metrics.paired_effect`. All remedies were trained on seed
{first}. The one that is best there at a setting and rate is the *rival*, which was trained on the other seeds too, at
rates that collapse, and is compared on them, so that it is not favoured by the choice; at healthy rates it is compared
on the seed of the choice, which favours it. On the other seeds, three arms were trained: `none`, the rival and the
autopilot. This plan was made when seed {first} was done: four seeds, micro models and 100 steps (text 150) are what
two cores gave in half an hour. Runs without an autopilot are computed by compiled operators,
which round otherwise: at the healthy rates of this table the losses of untouched runs differ from those of none by
up to 0.001, and at rate 0.03 by 0.013 in the audit's runs.
"""

# Written by hand, after the held-out runs, from runs of their own; nothing of the policy was changed for it.
_BEHIND = """## Where it falls behind: latent attention at 0.1

What it did at seed 40: clips on heads of the first layer at step 3, of the second from step 5 on, lalr at steps 8 and
12. The largest logit was 13 at step 3, 53 at step 8 all the same, and 23 at step 16; under the lalr that is always on
it was 4.9 at step 8 and 9.4 at step 16. To tell the reasons apart, the same model was trained with both remedies always
on, and with a policy in the place of the autopilot's that puts both on all heads when the record of one step is there
(`at_step`). Held-out loss in the mean of seeds 40 to 43, printed by
`python -m experiments.autopilot mla experiments/results/autopilot-mla-2026-11-22.csv`:

| remedy | loss | less lalr:tau=0.1 |
|---|---|---|
| lalr:tau=0.1 | 2.629 | – |
| lalr:tau=0.1+qk_clip:threshold=15 | 2.618 | -0.011, -0.032 to +0.010 |
| autopilot:at_step=3 | 2.744 | +0.116, +0.036 to +0.195 |
| autopilot | 2.744 | +0.115, +0.038 to +0.192 |
| autopilot:patience=1 | 2.791 | +0.162, +0.096 to +0.229 |
| autopilot:at_step=5 | 2.837 | +0.209, +0.137 to +0.280 |

So neither the clip nor the order of the two costs anything: the five steps at the full rate do, before the first action
is active. Why they cost more here than elsewhere was not looked into; keys and values of latent attention share a
projection. Nothing was to be seen earlier: the first alarm came with the record of step 3, where the largest logit was
13. `patience=1` does not help. Where the rate is known to be too high for latent attention, lalr from the start
is the better choice.
"""


class Results:
    """The runs by setting and rate, seed and remedy; of seeds that have a run of none and one of the autopilot."""

    def __init__(self, files: Iterable[Path]) -> None:
        found: dict[Cell, dict[int, dict[str, Run]]] = {}
        for path in files:
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    seeds = found.setdefault((row["setting"], float(row["lr"])), {})
                    seeds.setdefault(int(row["seed"]), {})[row["remedy"]] = row
        self.runs = {
            cell: {seed: runs for seed, runs in sorted(seeds.items()) if {OWN, NONE} <= set(runs)}
            for cell, seeds in found.items()
        }
        self.each = [(cell, seed, runs) for cell, seeds in self.runs.items() for seed, runs in seeds.items()]
        self.first = min(seed for _, seed, _ in self.each)
        self.hot = [cell for cell in self.runs if any(_collapsed(r[NONE]) for r in self.runs[cell].values())]

    def taken(self, cell: Cell) -> list[str]:
        """The remedies that were trained on the first seed and that the model takes."""
        return [name for name, run in self.runs[cell].get(self.first, {}).items() if run["val_loss"]]

    def loss(self, cell: Cell, remedy: str) -> float:
        """The loss on the first seed."""
        return float(self.runs[cell][self.first][remedy]["val_loss"])

    def rival(self, cell: Cell) -> str:
        """The remedy, always on, that is best on the first seed."""
        always = [remedy for remedy in self.taken(cell) if remedy not in (NONE, OWN)]
        return min(always, key=lambda remedy: self.loss(cell, remedy))

    def gaps(self, cell: Cell) -> list[float]:
        """The loss of the autopilot less the rival's, on the other seeds, or on the first where there are no others."""
        other = self.rival(cell)
        gaps = {
            s: float(r[OWN]["val_loss"]) - float(r[other]["val_loss"]) for s, r in self.runs[cell].items() if other in r
        }
        return [gap for seed, gap in gaps.items() if seed != self.first] or list(gaps.values())


def page(files: Sequence[Path]) -> str:
    """The whole page."""
    results = Results(files)
    command = " ".join(
        ["python -m experiments.autopilot page", *(f"experiments/results/{path.name}" for path in files)]
    )
    seeds = sorted({seed for _, seed, _ in results.each})
    count, settings = sum(len(runs) for *_, runs in results.each), dict.fromkeys(cell[0] for cell in results.runs)
    what = f"{count} runs on seeds {', '.join(map(str, seeds))}; settings {', '.join(settings)}. 2 cores, torch 2.13."
    others = ", ".join(f"{name} {_times_of_none(results, name):.2f}" for name in ("qk_norm", "lalr:tau=0.1"))
    cost = f"{_times_of_none(results, OWN):.1f}"
    head = _HEAD.format(command=command, what=what, first=results.first, cost=cost, others=others)
    parts = [head, _goals(results), _losses(results), _pareto(results), _touched(results), _lead(results), _BEHIND]
    return "\n".join(parts)


def latent_table(path: Path, seeds: Sequence[int]) -> str:
    """The mean losses of the remedies in this file, and what they are less those of the first."""
    with path.open(encoding="utf-8", newline="") as file:
        loss = {(int(row["seed"]), row["remedy"]): float(row["val_loss"]) for row in csv.DictReader(file)}
    first, *others = dict.fromkeys(remedy for _, remedy in loss)
    lines = [
        f"| remedy | loss | less {first} |",
        "|---|---|---|",
        f"| {first} | {_mean([loss[s, first] for s in seeds]):.3f} | – |",
    ]
    for remedy in others:
        less = _mean_and_interval([loss[seed, remedy] - loss[seed, first] for seed in seeds])
        lines.append(f"| {remedy} | {_mean([loss[seed, remedy] for seed in seeds]):.3f} | {less} |")
    return "\n".join(lines)


def _goals(results: Results) -> str:
    bad = [runs for *_, runs in results.each if _collapsed(runs[NONE])]
    well = [runs for *_, runs in results.each if not _collapsed(runs[NONE])]
    kept = sum(not _collapsed(runs[OWN]) for runs in bad)
    touched = [runs for runs in well if runs[OWN]["first_step"]]
    alone = len(well) - len(touched)
    cost = max((_over_none(runs) for runs in touched), default=0.0)
    whole = [_cells(results, hot) for hot in (True, False)]
    worst = f"at worst {cost:+.3f} over none" if touched else "none was touched"
    calm = [cell for cell in results.runs if cell not in results.hot]
    lines = [
        f"| 90 % of the cells that collapse are kept from it ({kept} of {len(bad)} runs) | {_share(*whole[0])} | "
        f"{_read(0.9, 1.0, *share_interval(*whole[0]))} |",
        f"| 95 % of the healthy cells are untouched ({alone} of {len(well)} runs) | {_share(*whole[1])} | "
        f"{_read(0.95, 1.0, *share_interval(*whole[1]))} |",
        f"| the touched ones are not worse by over {WORSE} | {worst} | – | not decided |",
        _loss_goal(results, "where none collapses", calm),
        _loss_goal(results, "where runs collapse", results.hot),
    ]
    about = (
        "One reading for every goal: reached where all of the interval is within it, missed where none of it is, else\n"
        "not decided. Runs of a cell, a setting at a rate, are alike, so shares are of cells: one counts as kept, or\n"
        "untouched, if all of its seeds are. The loss goals are means over settings but vision, whose loss has\n"
        "another unit; the interval is over these."
    )
    return "\n".join(
        ["## Goals\n", about, "", "| goal | figure | 95 % interval | reached |", "|---|---|---|---|", *lines, ""]
    )


def _loss_goal(results: Results, where: str, cells: Sequence[Cell]) -> str:
    start = f"| loss equal to the best always-on remedy (margin {MARGIN}), at rates {where}"
    gaps = [_mean(results.gaps(cell)) for cell in cells if cell[0] not in NOT_TEXT]
    if len(gaps) < 2:
        return f"{start} | too few settings | – | – |"
    found = paired_effect(gaps)
    interval = f"{found.low:+.3f} to {found.high:+.3f}"
    read = _read(-math.inf, MARGIN, found.low, found.high)
    return f"{start} | {found.mean:+.3f} over {len(gaps)} | {interval} | {read} |"


def _losses(results: Results) -> str:
    lines = [
        "## Collapses and loss, by setting and peak rate\n",
        f"Collapsed runs of all seeds, of none and of the autopilot; held-out loss on seed {results.first}; the loss",
        "of the autopilot less that of the rival on the other seeds, where it was trained there.\n",
        "| setting | rate | collapsed: none, autopilot | none | always on | autopilot | less the rival |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell, seeds in results.runs.items():
        bad = [sum(_collapsed(runs[name]) for runs in seeds.values()) for name in (NONE, OWN)]
        always = [r for r in results.taken(cell) if r not in (NONE, OWN)]
        words = ", ".join(f"{r} {results.loss(cell, r):.3f}" + _star(results, cell, r) for r in always)
        own = f"{results.loss(cell, NONE):.3f} | {words} | {results.loss(cell, OWN):.3f}"
        lines.append(
            f"| {cell[0]} | {cell[1]:g} | {bad[0]}, {bad[1]} of {len(seeds)} | {own} | {_gap(results, cell)} |"
        )
    return "\n".join([*lines, "\n\\* collapsed\n"])


def _star(results: Results, cell: Cell, remedy: str) -> str:
    return r"\*" if _collapsed(results.runs[cell][results.first][remedy]) else ""


def _gap(results: Results, cell: Cell) -> str:
    gaps = results.gaps(cell)
    if len(gaps) < 2:
        return f"{gaps[0]:+.3f} ({results.rival(cell)}, one seed)"
    found = paired_effect(gaps)
    return f"{found.mean:+.3f}, {found.low:+.3f} to {found.high:+.3f} ({results.rival(cell)}, {len(gaps)} seeds)"


def _pareto(results: Results) -> str:
    """What each remedy costs where nothing is wrong against what it gains where something is."""
    cells = [cell for cell in results.runs if cell[0] not in NOT_TEXT]
    points, means = {}, {}
    for remedy in [r for r in results.taken(cells[0]) if all(r in results.taken(cell) for cell in results.runs)]:
        over = {cell: results.loss(cell, remedy) - results.loss(cell, NONE) for cell in cells}
        sides = [[over[cell] for cell in cells if (cell in results.hot) is bad] for bad in (False, True)]
        calm, hot = map(_mean, sides)
        means[remedy] = [_mean_and_interval(side) for side in sides]
        points[remedy] = calm, hot, sum(bool(_star(results, cell, remedy)) for cell in results.runs)
    lines = [
        "## Pareto front\n",
        f"On seed {results.first}, over all settings but vision: mean loss over that of none at the rates where no run",
        "collapses without a remedy, and at those where runs do, with its interval over the settings; collapsed runs.",
        "A remedy is on the front if no other remedy beats it in all three.\n",
        "| remedy | healthy rates | rates that collapse | collapsed | on the front |",
        "|---|---|---|---|---|",
    ]
    for remedy, point in points.items():
        others = [other for other in points.values() if other != point]
        beaten = any(all(a <= b for a, b in zip(other, point, strict=True)) for other in others)
        calm, hot = means[remedy]
        lines.append(f"| {remedy} | {calm} | {hot} | {point[2]} | {'no' if beaten else '**yes**'} |")
    return "\n".join([*lines, ""])


def _mean_and_interval(gaps: Sequence[float]) -> str:
    if len(gaps) < 2 or not any(gaps):
        return f"{_mean(gaps):+.3f}"
    found = paired_effect(gaps)
    return f"{found.mean:+.3f}, {found.low:+.3f} to {found.high:+.3f}"


def _touched(results: Results) -> str:
    lines = ["## Healthy runs that were touched\n"]
    for cell, seed, runs in results.each:
        if runs[OWN]["first_step"] and not _collapsed(runs[NONE]):
            when = f"first at step {runs[OWN]['first_step']} ({runs[OWN]['actions']})"
            lines.append(f"- {cell[0]} at {cell[1]:g}, seed {seed}: {when}; loss {_over_none(runs):+.3f} over none")
    return "\n".join([*lines, *(["None."] if len(lines) == 1 else []), ""])


def _lead(results: Results) -> str:
    """How long before a collapse it acted."""
    lines = [
        "## Lead\n",
        "Of the runs that collapse without a remedy: the record at which the run without one first had a mean entropy",
        "under 0.1 nats, and the record of the autopilot's first action, by seed.\n",
        "| setting | rate | entropy under 0.1 at step | first action at step | least lead |",
        "|---|---|---|---|---|",
    ]
    for cell, seeds in results.runs.items():
        pairs = [
            (int(runs[NONE]["collapse_step"]), int(runs[OWN]["first_step"]))
            for runs in seeds.values()
            if _collapsed(runs[NONE]) and runs[NONE]["collapse_step"] and runs[OWN]["first_step"]
        ]
        if pairs:
            ends, starts = (", ".join(str(pair[i]) for pair in pairs) for i in (0, 1))
            least = min(end - start for end, start in pairs)
            lines.append(f"| {cell[0]} | {cell[1]:g} | {ends} | {starts} | {least} steps |")
    return "\n".join([*lines, ""])


def _over_none(runs: dict[str, Run]) -> float:
    return float(runs[OWN]["val_loss"]) - float(runs[NONE]["val_loss"])


def _collapsed(run: Run) -> bool:
    return run["collapsed"].lower() == "true"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _read(least: float, most: float, low: float, high: float) -> str:
    """Whether an interval lies within a goal."""
    if least <= low and high <= most:
        return "yes"
    return "**no**" if high < least or low > most else "not decided"


def _cells(results: Results, hot: bool) -> tuple[int, int]:
    """Of the cells that collapse without a remedy those whose runs are all kept, or of the others those whose runs are
    all untouched, and how many there are."""
    found = [runs for cell, runs in results.runs.items() if (cell in results.hot) is hot]
    good = [all(not _collapsed(r[OWN]) if hot else not r[OWN]["first_step"] for r in runs.values()) for runs in found]
    return sum(good), len(found)


def _times_of_none(results: Results, remedy: str) -> float:
    """The median over runs of a remedy's processor time over that of none."""
    pairs = [(runs[remedy], runs[NONE]) for *_, runs in results.each if remedy in runs and runs[remedy]["cpu_seconds"]]
    return statistics.median(float(a["cpu_seconds"]) / float(b["cpu_seconds"]) for a, b in pairs)


def _share(k: int, n: int) -> str:
    low, high = share_interval(k, n)
    return f"{k} of {n}" + (f" ({k / n:.0%}) | {low:.0%} to {high:.0%}" if n else " | –")


def share_interval(k: int, n: int) -> tuple[float, float]:
    """The exact 95 % interval of a share. Source: Clopper and Pearson 1934.

    >>> [round(x, 3) for x in share_interval(8, 8)]
    [0.631, 1.0]
    """

    def at_least(p: float, k: int) -> float:
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))

    def solved(f: Callable[[float], float], level: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if f(middle) < level else (low, middle)
        return low

    low = solved(lambda p: at_least(p, k), 0.025) if k else 0.0
    return low, solved(lambda p: at_least(p, k + 1), 0.975) if k < n else 1.0
