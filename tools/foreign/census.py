"""Every target in a forked process of its own, and the page of what was found.

python -m tools.foreign.census [--only timm,litgpt] [--names Swin] [--questions maps] [--jobs 1] [--cases 2000] [--idioms 500]
    [--out FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tools.foreign import generator, idioms
from tools.foreign.checks import judged, overall
from tools.foreign.page import attentions, page, shares
from tools.foreign.reference import calls, capped_output
from tools.foreign.tables import TARGETS
from tools.foreign.target import Target, another, settled, uneven, with_torchvision
from tools.foreign.work import Subject

LIMIT = 600  # seconds for one target
FIRST = (0, 10_000, 20_000)  # where the seeds of the idioms begin


def judge(target: Target, questions: list[str] | None = None) -> dict[str, Any]:
    """The findings of a target on these questions (all of them), or why there are none."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, example = target.make()
            model = settled(uneven(model), example)
            seen = calls(model, example, target.shape)
            if len(seen) != target.attentions:
                shapes = [(c.module, tuple(c.z.shape)) for c in seen]
                return {
                    "broken": f"expected {target.attentions} attentions, the reference saw {len(seen)}: {shapes}"
                }
            subject = Subject(
                model=model,
                example=example,
                other=another(example),
                double=target.double,
                truth=functools.partial(_truth, target),
                capped=functools.partial(_capped, target),
            )
            found = judged(subject, questions)
    except Exception as error:
        tail = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(tail.filename).name}:{tail.lineno}"
        return {
            "broken": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"
        }
    return {**dataclasses.asdict(found), "verdict": overall(found.found)}


def _truth(target: Target, model: Any, example: Any) -> Any:
    return calls(model, example, target.shape)


def _capped(
    target: Target, model: Any, example: Any, cap: float, places: set[int]
) -> Any:
    return capped_output(model, example, target.shape, cap, places)


def run(
    targets: list[Target],
    jobs: int,
    folder: Path,
    questions: list[str] | None = None,
) -> list[dict[str, Any]]:
    """The results in the order of the targets; each package in a process of its own, which imports it once."""
    torch.set_num_threads(1)
    with_torchvision()
    packages: dict[str, list[int]] = {}
    for place, target in enumerate(targets):
        packages.setdefault(target.package, []).append(place)
    waiting, running = list(packages.values()), 0
    while waiting or running:
        if waiting and running < jobs:
            batch = [(place, targets[place]) for place in waiting.pop(0)]
            _child(batch, folder, questions)
            running += 1
        else:
            os.wait()
            running -= 1
    return [_result(folder / str(place)) for place in range(len(targets))]


def _child(
    targets: list[tuple[int, Target]], folder: Path, questions: list[str] | None
) -> None:
    sys.stdout.flush()
    if os.fork():
        return
    said, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    signal.signal(signal.SIGALRM, _late)
    for place, target in targets:
        start = time.monotonic()
        signal.alarm(LIMIT)
        result = judge(target, questions)
        signal.alarm(0)
        (folder / str(place)).write_text(json.dumps(result))
        print(
            f"{target.package} {target.name} ({time.monotonic() - start:.0f} s): {_line(result)}",
            file=said,
            flush=True,
        )
    os._exit(0)


def _late(*_: object) -> None:
    raise TimeoutError(f"no result within {LIMIT} s")


def _result(path: Path) -> dict[str, Any]:
    return (
        json.loads(path.read_text())
        if path.exists()
        else {"broken": f"no result within {LIMIT} s"}
    )


def _line(result: dict[str, Any]) -> str:
    said = [
        f"{f['question']}: {f['verdict']} {f['site'] or ''} {f['said']}"
        for f in result.get("found", ())
        if f["verdict"] != "right"
    ]
    right = result.get("attentions", []).count("right")
    first = f"{result.get('verdict', 'BROKEN ' + result.get('broken', ''))}, {right} of {len(result.get('attentions', ()))}"
    return "\n    ".join([first, *dict.fromkeys(said)])


def main() -> None:
    """Run the census; write the page with --out. Exit 1 if anything is wrong or broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--names", default="")
    parser.add_argument("--questions", default="", help="by default all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cases", type=int, default=0, help="random attentions")
    parser.add_argument(
        "--idioms",
        type=int,
        default=0,
        help="attentions in other idioms, from each of three seeds",
    )
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    targets = [
        t
        for t in TARGETS
        if (not chosen.only or t.package in chosen.only.split(","))
        and (not chosen.names or chosen.names in t.name)
    ]
    with TemporaryDirectory() as folder:
        questions = chosen.questions.split(",") if chosen.questions else None
        results = run(targets, chosen.jobs, Path(folder), questions)
    verdicts = [r.get("verdict", "broken") for r in results]
    print(
        f"{len(targets)} targets of {len({t.package for t in targets})} packages: {shares(verdicts)}"
    )
    print(f"their attentions: {shares(attentions(targets, results))}")
    generated = generator.run(range(chosen.cases)) if chosen.cases else None
    in_idioms = (
        [v for first in FIRST for v in idioms.run(range(first, first + chosen.idioms))]
        if chosen.idioms
        else []
    )
    if chosen.out is not None:
        chosen.out.write_text(page(targets, results, generated, in_idioms))
    sys.exit(
        1 if {"wrong", "broken"} & {*verdicts, *(generated or ()), *in_idioms} else 0
    )


if __name__ == "__main__":
    main()
