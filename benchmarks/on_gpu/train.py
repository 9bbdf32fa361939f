"""The 100M recipes on one GPU, in pieces of a few minutes: each form of attention, and how it reads longer texts.

`python -m benchmarks.on_gpu.train`, or `python -m benchmarks.on_gpu.train`, trains both recipes (gated attention
units; attention and MLP)
with Baseline, KNA and CosA, each with and without log n, one after the other. It stops after --minutes with a
checkpoint in --runs; the same command goes on from there, on another machine too if that folder is brought along.
Runs that are done are measured on held-out texts of 512 to 4,096 tokens. Each piece ends with the table of all runs
and writes it into benchmarks/results/gpu-train-DATE.json. numpy and safetensors are needed besides torch.

--steps N is the length of each run, and part of what it is: fewer than the recipe's 30,000 make another run, and the
table says so. --toy trains small copies on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.measure import about
from qkeel.errors import QkeelError
from qkeel.lab import DataConfig, LongContexts, ModelConfig, RunConfig, Watcher, run
from qkeel.lab.lengths import measure
from qkeel.records import RunDirectory, RunStatus
from qkeel.records.file_formats import read_toml

FOLDER = Path(__file__).parents[2] / "experiments" / "recipes"
RECIPES = ("mha-100m-512", "gau-100m-512")
FORMS = ("baseline", "baseline_logn", "kna", "kna_logn", "cosa", "cosa_logn")
TIMES = (1, 2, 4, 8)  # the training length, for the texts that runs are measured on
MEASURING = 60.0  # seconds kept for the measurement of a run that ends in this piece


def configurations(options: argparse.Namespace) -> dict[str, RunConfig]:
    """Every run by the name of its directory."""
    found = {}
    for recipe in options.recipes:
        base = RunConfig.from_dict(read_toml(FOLDER / f"{recipe}.toml"))
        base = small(base) if options.toy else base
        for form in options.forms:
            said = (
                form
                if form == "baseline"
                else f"{form}:train_length={base.data.context}"
            )
            found[f"{recipe}-{form}"] = dataclasses.replace(
                base,
                model=dataclasses.replace(base.model, attention=said),
                data=dataclasses.replace(base.data, source=options.data),
                steps=options.steps,
                eval_every=min(
                    base.eval_every, options.steps // base.log_every * base.log_every
                ),
                compile=base.compile and options.compile,
            )
    return found


def small(config: RunConfig) -> RunConfig:
    """The recipe but for its size."""
    heads = {"head_dim": 8} if config.model.block == "gau" else {"n_heads": 2}
    return dataclasses.replace(
        config,
        model=ModelConfig(
            **{
                **dataclasses.asdict(config.model),
                "d_model": 16,
                "n_layers": 2,
                **heads,
            }
        ),
        data=DataConfig(context=8, batch=4),
        accumulate=2,
        log_every=1,
        eval_sequences=2,
        probe_sequences=1,
        device="cpu",
        compile=False,
    )


def train(runs: Mapping[str, RunConfig], folder: Path, end: float) -> None:
    """Trains what is left, in order, until the time is over."""
    watcher = Watcher(should_stop=lambda: time.monotonic() > end)
    for name, config in runs.items():
        place = RunDirectory(folder / name)
        if place.status is RunStatus.DONE:
            continue
        if time.monotonic() > end:
            return
        print(f"{name} …", flush=True)
        try:
            run(config, folder / name, watcher=watcher)
        except KeyboardInterrupt:
            if time.monotonic() <= end:
                raise
            return
        except QkeelError as error:  # one that fails leaves the others alone
            print(f"{name}: {error}", flush=True)
        else:
            lengths(config, place)


def lengths(config: RunConfig, place: RunDirectory) -> None:
    """Measures a run that is done on texts of 1, 2, 4 and 8 times its length, as far as it is not measured."""
    at = tuple(n * config.data.context for n in TIMES)
    try:
        measure(
            config,
            place,
            LongContexts(
                posthoc=("none",), test_lengths=at, sequences=config.eval_sequences
            ),
        )
    except QkeelError as error:
        print(f"{place.path.name}: {error}", flush=True)


def row(config: RunConfig, place: RunDirectory) -> dict[str, object]:
    """What is known of a run: its step, its last losses, and its losses by the length of the text."""
    lines = place.metrics() if place.status is not RunStatus.MISSING else []
    last = lines[-1] if lines else {}
    found = {
        line["test_length"]: line for line in (place.long_contexts() if lines else [])
    }
    return {
        "step": last.get("step", 0),
        "of": config.steps,
        "train_loss": last.get("train_loss"),
        "val_loss": next(
            (
                line["val_loss"]
                for line in reversed(lines)
                if line.get("val_loss") is not None
            ),
            None,
        ),
        "tokens_per_second": last.get("tokens_per_second"),
        "max_logit": max((line["max_logit"] for line in lines), default=None),
        "loss": {str(n): line.get("loss_nonrepeat") for n, line in found.items()},
        "accuracy_last": {
            str(n): line.get("accuracy_last") for n, line in found.items()
        },
        "accuracy_last_short": {
            str(n): line.get("accuracy_last_short") for n, line in found.items()
        },
    }


def table(rows: Mapping[str, Mapping[str, object]], lengths: Sequence[int]) -> str:
    """The runs as Markdown: loss in nats a token on texts of each length."""
    head = [
        "run",
        "step",
        "tokens/s",
        "train loss",
        "val loss",
        *(f"loss at {n}" for n in lengths),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, found in rows.items():
        losses = found["loss"]
        assert isinstance(losses, dict)
        numbers = [
            found["train_loss"],
            found["val_loss"],
            *(losses.get(str(n)) for n in lengths),
        ]
        told = ["–" if x is None or math.isnan(x) else f"{x:.3f}" for x in numbers]  # type: ignore[arg-type]
        speed = found["tokens_per_second"]
        fast = "–" if speed is None else f"{speed:,.0f}"
        lines.append(
            f"| {name} | {found['step']} of {found['of']} | {fast} | {' | '.join(told)} |"
        )
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu.train", description=__doc__
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="tiny sizes on a CPU: only to see that it runs",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="after which a checkpoint is written and it ends",
    )
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument(
        "--data",
        default="stdlib",
        help="as `qkeel run --data`; by default Python's own sources",
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="torch.compile takes a minute a run",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/gpu-train"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains one piece and writes the table of what is known."""
    options, start = parsed(arguments), time.monotonic()
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: there is no CUDA device here; --toy shows that it runs")
        return 0
    runs = configurations(options)
    for (
        name,
        config,
    ) in runs.items():  # an earlier piece may have ended in the middle of this
        if RunDirectory(options.runs / name).status is RunStatus.DONE:
            lengths(config, RunDirectory(options.runs / name))
    train(runs, options.runs, start + max(0.5, 60 * options.minutes - MEASURING))
    rows = {
        name: row(config, RunDirectory(options.runs / name))
        for name, config in runs.items()
    }
    notes = about("python -m benchmarks.on_gpu.train", 0) | {
        "device": "cpu, toy" if options.toy else torch.cuda.get_device_name(),
        "steps": f"{options.steps}; the recipes have 30000",
        "data": options.data,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = (
        options.out / f"gpu-train-{notes['date']}{'-toy' if options.toy else ''}.json"
    )
    path.write_text(json.dumps({"about": notes, "runs": rows}, indent=1) + "\n")
    context = next(iter(runs.values())).data.context
    print(
        f"\n{notes['device']}, {notes['steps']}\n\n{table(rows, [n * context for n in TIMES])}\n\nwritten: {path}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
