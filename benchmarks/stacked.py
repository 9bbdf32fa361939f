"""Runs of one remedy, one by one by torch's operators and in stacks: CPU milliseconds of a step, probe and evaluation.

`python -m benchmarks.stacked`; `--toy` for a quick look that nothing is broken. Each remedy is a table of its own.
"""

from __future__ import annotations

import dataclasses
import itertools

from benchmarks.measure import Bench, Case, Cases
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import RunConfig
from qkeel.lab.training import TrainingBackend, choose_arithmetic, train_step

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


def steps_of(arithmetic: TrainingBackend) -> Case:
    """A case: the next step of a stack."""
    counter = itertools.count()
    return lambda: train_step(arithmetic, [next(counter)] * len(arithmetic.runs))


def step_cases(remedy: str, sizes: tuple[int, ...]) -> Cases:
    """Returns as many steps as there are runs in the largest stack, by one run alone and by stacks of several sizes."""
    most = max(sizes)
    alone = steps_of(TrainingBackend([RunState(configs(remedy, 1)[0])]))
    cases: Cases = {"alone": lambda: [alone() for _ in range(most)]}
    for size in sizes:
        one = steps_of(choose_arithmetic([RunState(c) for c in configs(remedy, size)]))
        cases[f"stack of {size}"] = lambda one=one, n=most // size: [one() for _ in range(n)]
    return cases


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    flags = {"--remedies": {"nargs": "+", "default": REMEDIES}}
    bench = Bench("stacked", __doc__, arguments, rounds=5, flags=flags)
    sizes = (2,) if bench.toy else (1, 8, 16)
    for remedy in ("none",) if bench.toy else bench.options.remedies:
        bench.table(f"{remedy}: {max(sizes)} steps of one run", step_cases(remedy, sizes))
    n = 2 if bench.toy else 8
    stack = choose_arithmetic([RunState(c) for c in configs("none", n)])
    single = TrainingBackend([RunState(configs("none", 1)[0])])
    for name, alone, stacked in (("probe", single.probe, stack.probe), ("evaluate", single.evaluate, stack.evaluate)):
        cases: Cases = {"alone": lambda alone=alone: [alone() for _ in range(n)], f"stack of {n}": stacked}
        bench.table(f"none: {name} of {n} runs", cases, warmup=1)


if __name__ == "__main__":
    main()
