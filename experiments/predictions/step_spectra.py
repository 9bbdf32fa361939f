"""Does what a step adds to W_QᵀW_K predict the change of the logits, and does it lead the alarms?

    python -m experiments.predictions.step_spectra run --seeds 40 41 42 --out ROWS    appends a row for each run that
    ROWS lacks
    python -m experiments.predictions.step_spectra judge ROWS                            prints the verdicts, writes
    the table
    python -m experiments.predictions.step_spectra judge                                 the same from the table,
    writes the page

What was predicted is in step_spectra.md, written before the first run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import qkeel
from experiments.alarms import lasting_gap
from experiments.predictions.order import over_seeds, verdict
from qkeel.lab.build_run import learning_rate
from qkeel.lab.config import DataConfig, OptimConfig
from qkeel.lab.text import Corpus, batch, heldout, load
from qkeel.metrics import collapsed
from qkeel.monitor import AllSinks, GateShut, History, PlannedRates, Severity, replay
from qkeel.nn import Decoder, DecoderConfig
from qkeel.spec import AttentionSpec, RMSNorm, Rope, Sink

TABLE = Path(__file__).parents[1] / "results" / "step-spectra-2026-11-23.json"
PAGE = Path(__file__).parents[1] / "notes" / "results" / "step-spectra.md"
STEPS, MEASURED, EVERY, HEADS, WIDTH = 150, 2, 5, 4, 64
LRS = (0.003, 0.01, 0.03, 0.1, 0.3)
TUNED, JUDGED = range(40, 43), range(50, 56)
REFERENCE = "qk_norm"
KINDS = ("none", "lalr:tau=0.1", REFERENCE, "sink")
TEXTS = ("step_spectra.md", "step_spectra_reading.md")
LEAST_LEAD, MOST_FALSE, LEAST_ORDER, FACTOR, SHARE = 10, 0.05, 0.8, 3.0, 0.9

Row = dict[str, Any]


def spec_of(kind: str) -> AttentionSpec:
    """The attention of a run."""
    if kind == REFERENCE:
        return AttentionSpec(position=Rope(), norm=RMSNorm(gain="dim"))
    return AttentionSpec(position=Rope(), **({"normalizer": Sink()} if kind == "sink" else {}))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of the next bytes, in nats."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(kind: str, lr: float, seed: int, corpus: Corpus) -> Row:
    """One run: its losses, and unless it is a reference the courses that are judged."""
    config, data = OptimConfig(lr=lr), DataConfig()
    model = Decoder(DecoderConfig(vocab_size=corpus.vocab_size, spec=spec_of(kind)))
    model.init_weights(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    if kind.startswith("lalr"):
        qkeel.apply(model, kind, optimizer)
    tokens = torch.from_numpy(heldout(corpus, data.context, 64))
    probe = torch.from_numpy(batch(corpus, data, seed, STEPS + 1))[:, :-1]
    rates = [learning_rate(config, step, STEPS) for step in range(STEPS)]
    watched = kind != REFERENCE
    stats = {"sink": "all+gates", REFERENCE: "entropy"}.get(kind, "all+updates")
    more = {"probe": (probe,)} if stats == "all+updates" else {}
    losses, gains = dict[int, float](), list[list[tuple[float, float]]]()
    with qkeel.watch(
        model, optimizer, every=MEASURED, stats=stats, rules=(), planned=PlannedRates.of(rates), **more
    ) as monitor:
        for step, rate in enumerate(rates):
            if step % EVERY == 0:
                losses[step] = heldout_loss(model, tokens)
            if step % MEASURED == 0 or step == STEPS - 1:  # those that the monitor measures
                gains.append([gain_of(block.attention_norm) for block in model.blocks])
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss_of(model, torch.from_numpy(batch(corpus, data, seed, step))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        history = monitor.history
    losses[STEPS] = heldout_loss(model, tokens)
    entropy = history.heads["entropy"]
    row: Row = {"kind": kind, "lr": lr, "seed": seed, "losses": losses, "entropy": float(np.nanmean(entropy[-1]))}
    row["collapsed"] = collapsed(row["entropy"], losses[STEPS], losses[0])
    if watched:
        row |= judged_course(history, np.array(gains), rates)
    return row


def heldout_loss(model: nn.Module, tokens: Tensor) -> float:
    """In evaluation mode, so that the monitor keeps it apart."""
    model.eval()
    with torch.no_grad():
        found = float(loss_of(model, tokens))
    model.train()
    return found


def gain_of(norm: nn.Module) -> tuple[float, float]:
    """The mean square and the largest of a norm's gains."""
    gain = next(norm.parameters()).detach()
    return float(gain.square().mean()), float(gain.abs().max())


def judged_course(history: History, gains: np.ndarray, rates: Sequence[float]) -> Row:
    """The numbers of a run that the verdicts need; gains [steps layers 2]."""
    alarms = [alarm for alarm in replay(history) if alarm.severity is not Severity.NOTICE]
    row: Row = {"alarm": min((alarm.step for alarm in alarms), default=None)}
    row["max_logit"] = float(np.nanmax(history.heads["max_logit"]))
    for rule in (AllSinks(), GateShut()):
        found = replay(history, [rule])
        row[rule.name] = found[0].step if found else None
    if "delta2_spectral_norm" not in history.heads:
        return row
    heads = history.heads
    n = len(heads["delta2_spectral_norm"])
    scale = (WIDTH // HEADS) ** -0.5
    mean, largest = (gains[:n, :, i, None] for i in (0, 1))
    second, third = heads["delta2_spectral_norm"], heads["delta3_spectral_norm"]
    predicted = second * np.sqrt(heads["delta2_stable_rank"]) * mean * scale
    bound = (second + third) * WIDTH * largest**2 * scale
    measured = heads["logit_change_rms"]
    fine = np.isfinite(measured) & np.isfinite(predicted) & (predicted > 0) & (measured > 0)
    ratio = measured[fine] / predicted[fine]
    row["order"] = spearman(predicted[fine], measured[fine])
    row["order_by_layer"] = [
        spearman(predicted[:, i][fine[:, i]], measured[:, i][fine[:, i]]) for i in range(fine.shape[1])
    ]
    row["ratio"] = [float(x) for x in np.quantile(ratio, (0.05, 0.5, 0.95))]
    own = measured[fine] / bound[fine]
    row |= {"records": int(fine.sum()), "over_bound": int((own > 1).sum()), "closest": float(own.max())}
    clock = np.cumsum(rates)[history.steps[:n].astype(int)]
    summed = MEASURED * np.nanmax(np.cumsum(np.nan_to_num(bound), axis=0), axis=(1, 2))
    ahead = summed * sum(rates) / clock
    # Running maxima: the step at which each threshold is passed for the first time.
    row["ahead"] = [float(f"{x:.5g}") for x in np.maximum.accumulate(ahead)]
    row["steps"] = [int(x) for x in history.steps[:n]]
    return row


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(a) > 2 else math.nan


def key(row: Row) -> tuple[str, float, int]:
    """The run of a row."""
    return row["kind"], row["lr"], row["seed"]


def run(seeds: Sequence[int], out: Path) -> None:
    """Appends the rows that are not there yet."""
    rows = read(out) if out.exists() else []
    known = {key(row) for row in rows}
    corpus = load(DataConfig())
    for seed in seeds:
        for kind in KINDS:
            for lr in LRS:
                if (kind, lr, seed) not in known and not (kind == "sink" and seed in TUNED):
                    row = train(kind, lr, seed, corpus)
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a file of lines, or of the committed table."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text)["rows"] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def is_wrong(row: Row, reference: Row) -> bool:
    """Collapsed, or for good over 0.1 nats behind the reference of its seed and rate."""
    histories = []
    for one in (row, reference):
        steps = np.array([int(s) for s in one["losses"]], dtype=float)
        losses = {"step": steps, "val_loss": np.array([*one["losses"].values()])}
        histories.append(History(steps=steps, values=losses, heads={}))
    return bool(row["collapsed"]) or lasting_gap(*histories) is not None


def fires(row: Row, threshold: float) -> int | None:
    """The first step at which Σ B, continued to the end of the schedule, is over the threshold."""
    return next((s for s, x in zip(row["steps"], row["ahead"]) if x > threshold), None)


def chosen(rows: Sequence[Row], wrong: Sequence[bool]) -> float:
    """The lowest threshold, so the earliest, with few enough false alarms."""
    healthy = [row for row, bad in zip(rows, wrong) if not bad]
    tops = sorted(max(row["ahead"]) for row in healthy)
    allowed = int(MOST_FALSE * len(healthy))
    return tops[len(tops) - 1 - allowed]


def judge(rows: Sequence[Row]) -> Row:
    """Every statement with its numbers and verdict."""
    table = {key(row): row for row in rows}
    own = [row for row in rows if "ahead" in row]
    wrong = {
        key(row): is_wrong(row, table[REFERENCE, row["lr"], row["seed"]]) for row in rows if row["kind"] != REFERENCE
    }
    tuned, held = ([row for row in own if row["seed"] in seeds] for seeds in (TUNED, JUDGED))
    threshold = chosen(tuned, [wrong[key(row)] for row in tuned])
    bad, healthy = ([row for row in held if wrong[key(row)] == state] for state in (True, False))
    seeds = sorted({row["seed"] for row in held})
    by_seed = {seed: [row for row in held if row["seed"] == seed] for seed in seeds}

    def median_order(places: np.ndarray) -> float:
        return float(np.nanmedian([row["order"] for i in places for row in by_seed[seeds[i]]]))

    def median_lead(places: np.ndarray) -> float:
        found = [lead(row) for i in places for row in by_seed[seeds[i]] if row in bad]
        known = [x for x in found if x is not None]
        return float(np.median(known)) if known else math.nan

    def lead(row: Row) -> int | None:
        """How many steps before the alarm it fires; STEPS stand for what does not fire."""
        mine = fires(row, threshold)
        if mine is None and row["alarm"] is None:
            return None
        return (STEPS if row["alarm"] is None else row["alarm"]) - (STEPS if mine is None else mine)

    order, ahead = over_seeds(len(seeds), median_order), over_seeds(len(seeds), median_lead)
    near = [1 / FACTOR <= row["ratio"][1] <= FACTOR for row in held]
    false = [row for row in healthy if fires(row, threshold) is not None]
    requested = {}
    for name, kinds in (("all sinks", ("none", "lalr:tau=0.1", "sink")), ("gate shut", ("sink",))):
        of = [row for row in rows if row["kind"] in kinds and row["seed"] in JUDGED and not wrong[key(row)]]
        requested[name] = [sum(row.get(name) is not None for row in of), len(of)]
    return {
        "order": order,
        "scale": [sum(near), len(near)],
        "ratio": [float(np.median([row["ratio"][i] for row in held])) for i in range(3)],
        "ratio_by_run": sorted(round(row["ratio"][1], 3) for row in held),
        "over_bound": [sum(row["over_bound"] for row in held), sum(row["records"] for row in held)],
        "runs_over_bound": sum(row["over_bound"] > 0 for row in held),
        "closest": max(row["closest"] for row in held),
        "threshold": threshold,
        "lead": ahead,
        "leads": sorted(x for row in bad if (x := lead(row)) is not None),
        "wrong_runs": len(bad),
        "wrong_that_fire": sum(fires(row, threshold) is not None for row in bad),
        "wrong_with_alarm": sum(row["alarm"] is not None for row in bad),
        "false": [len(false), len(healthy)],
        "false_alarms_of_default_rules": [sum(row["alarm"] is not None for row in healthy), len(healthy)],
        "rules on request, healthy runs that fire": requested,
    }


def verdicts(found: Row) -> list[tuple[str, str, str]]:
    """Of each prediction what was found, and whether it held."""

    def share(of: Sequence[int]) -> str:
        return f"{of[0]:,} of {of[1]:,}"

    order, lead = found["order"], found["lead"]
    near, false = found["scale"], found["false"]
    return [
        ("order", f"{order[0]:.2f} ({order[1]:.2f} to {order[2]:.2f})", verdict(order, LEAST_ORDER)),
        (
            "scale",
            f"{share(near)} runs; measured / p {found['ratio'][1]:.1f} in the median",
            "held" if near[0] >= SHARE * near[1] else "refuted",
        ),
        ("bound", f"{share(found['over_bound'])} changes are over B", "refuted" if found["over_bound"][0] else "held"),
        ("lead", f"{lead[0]:.0f} steps ({lead[1]:.0f} to {lead[2]:.0f})", verdict(lead, LEAST_LEAD)),
        ("false", f"{share(false)} healthy runs", "held" if false[0] <= MOST_FALSE * false[1] else "refuted"),
    ]


def page(found: Row) -> str:
    """The page of results: the prediction, the verdicts, what was read in them."""
    own = Path(__file__)
    before, after = (own.with_name(name).read_text(encoding="utf-8") for name in TEXTS)
    table = ["| prediction | found | verdict |", "|---|---|---|"]
    table += [f"| {' | '.join(one)} |" for one in verdicts(found)]
    head = "# Does what a step adds to the weights predict the logits?\n\n"
    head += "Made by `python -m experiments.predictions.step_spectra judge`.\n"
    return "\n".join([head, before, "## Verdicts\n", *table, "", after])


def main() -> None:
    """Runs or judges."""
    parser = argparse.ArgumentParser(prog="python -m experiments.predictions.step_spectra", description=__doc__)
    parser.add_argument("what", choices=("run", "judge"))
    parser.add_argument("rows", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*TUNED, *JUDGED])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "run":
        run(options.seeds, options.out)
        return
    rows = read(options.rows)
    found = judge(rows)
    print(json.dumps(found, indent=1, default=str))
    if options.rows == TABLE:
        PAGE.write_text(page(found), encoding="utf-8")
    else:
        text = json.dumps(
            {"command": "python -m experiments.predictions.step_spectra run", "verdicts": found, "rows": rows},
            default=str,
        )
        TABLE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
