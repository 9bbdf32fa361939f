"""Trains a family compiled, in a process of its own: python -m tests.contract.watch.compiled FAMILY BACKEND [STEPS]."""

from __future__ import annotations

import sys
import warnings

import torch
from tests.contract.watch.families import FAMILIES, Run, train
from torch._dynamo.utils import counters


def compiled_run(
    name: str, backend: str, steps: int, every: int | None
) -> tuple[Run, dict[str, int]]:
    """A run and what the compiler did for it."""
    torch._dynamo.reset()
    counters.clear()
    come, go = steps // 5, 4 * steps // 5
    run = train(
        FAMILIES[name],
        every=every,
        steps=steps,
        come=come,
        go=go,
        micro=1,
        compiled=backend,
    )
    breaks = sum(counters["graph_break"].values())
    return run, {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


def compare(name: str, backend: str, steps: int) -> None:
    """Fails unless the watched run is the unwatched one, bit for bit and graph for graph."""
    (plain, made), (seen, made_watched) = (
        compiled_run(name, backend, steps, every) for every in (None, 3)
    )
    assert seen.same(plain), "the numbers differ"
    assert made == made_watched, (made, made_watched)
    assert made["graphs"] > 0
    assert seen.monitor is not None
    assert len(seen.monitor.sites) == FAMILIES[name].sites
    watched = range(steps // 5, 4 * steps // 5)
    assert seen.monitor.steps == watched.stop
    assert len(seen.monitor.history) == sum(step % 3 == 0 for step in watched), (
        "not all steps were measured"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", category=UserWarning)
    warnings.filterwarnings("ignore", module="torch.*")
    compare(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 50)
