"""Runs of one remedy, one by one by torch's operators and in stacks: CPU milliseconds of a step, probe and evaluation.

`python -m benchmarks.stacked`; `--toy` for a quick look that nothing is broken. Each remedy is a table of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.stacked")  # before torch: the allocator reads its settings when the process starts

from benchmarks.measure import interleave, show
from qkeel.lab.config import RunConfig
from qkeel.lab.model import resolve
from qkeel.lab.stack import Stack
from qkeel.lab.trainer import Trainer

REMEDIES = (
    "none",
    "qk_norm",
    "qk_norm:kind=l2,gain=scalar",
    "softcap:cap=50",
    "qk_clip:threshold=30",
    "lalr:tau=0.1",
    "qk_lr:factor=0.1",
)
LRS = (0.003, 0.01, 0.02, 0.03, 0.05)


def configs(remedy: str, count: int) -> list[RunConfig]:
    """Micro runs of several rates and seeds."""
    base = RunConfig(remedy=remedy, device="cpu")
    grid = itertools.islice(itertools.product(range(count), LRS), count)
    return [resolve(dataclasses.replace(base, seed=s, optim=dataclasses.replace(base.optim, lr=lr))) for s, lr in grid]


def steps_of(stack: Stack) -> Callable[[], object]:
    """A case: the next step of a stack."""
    counter = itertools.count()
    return lambda: stack.step([next(counter)] * len(stack.trainers))


def table(remedy: str, sizes: tuple[int, ...], rounds: int) -> None:
    """Print the table of a remedy. A case does as many steps as there are runs in the largest stack."""
    most = max(sizes)
    alone, counter = Trainer(configs(remedy, 1)[0]), itertools.count()
    cases: dict[str, Callable[[], object]] = {"alone": lambda: [alone.step(next(counter)) for _ in range(most)]}
    for size in sizes:
        one = steps_of(Stack([Trainer(c) for c in configs(remedy, size)]))
        cases[f"stack of {size}"] = lambda one=one, n=most // size: [one() for _ in range(n)]
    show(f"{remedy}: {most} steps of one run", interleave(cases, "alone", rounds), "alone")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="two rounds of small stacks")
    parser.add_argument("--remedies", nargs="+", default=REMEDIES)
    options = parser.parse_args()
    for remedy in ("none",) if options.toy else options.remedies:
        table(remedy, (2,) if options.toy else (1, 8, 16), 2 if options.toy else 5)
    trainers = [Trainer(c) for c in configs("none", 2 if options.toy else 8)]
    stack, single = Stack(trainers), Trainer(configs("none", 1)[0])
    n, rounds = len(trainers), 2 if options.toy else 5
    for name in ("probe", "evaluate"):
        cases: dict[str, Callable[[], object]] = {
            "alone": lambda name=name: [getattr(single, name)() for _ in range(n)],
            f"stack of {n}": lambda name=name: getattr(stack, name)(),
        }
        show(f"none: {name} of {n} runs", interleave(cases, "alone", rounds, warmup=1), "alone")


if __name__ == "__main__":
    main()
