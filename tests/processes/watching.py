"""What the processes of a setup measure: python -m tests.processes.watching RANK WORLD FOLDER SETUP…"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.processes.pipelines import pipelined
from tests.processes.seen import Seen
from tests.processes.wrapped import batch, llama, part, wrapped
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel
from qkeel.errors import QkeelWarning
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.record.sample import Sample

STEPS = 3


class Collectives(TorchDispatchMode):
    """Counts the operators by which processes wait for each other."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.n += 1
        return func(*args, **(kwargs or {}))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


Pass = Callable[[nn.Module, int], float]


def trained(model: nn.Module, run: Pass, monitored: bool, **options: Any) -> Seen:
    """Three steps; what was seen, empty where nothing was monitored."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, counts = [], []
    samples: list[Sample] = []
    monitor: Monitor | None = None
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        if monitored:
            monitor = qkeel.watch(model, optimizer, rules=[], **options)
        for step in range(STEPS):
            with Collectives() as counted:
                losses.append(run(model, step))
                optimizer.step()
                optimizer.zero_grad()
            counts.append(counted.n)
            samples += [] if monitor is None or monitor.sample is None else [monitor.sample]
    warned = [str(w.message) for w in record if isinstance(w.message, QkeelWarning)]
    if monitor is None:
        return Seen((), [], {}, {}, {}, warned, losses, counts, "")
    sample = monitor.sample
    reads = {
        site: {name: x.numpy() for name, x in stats.tensors().items()} for site, stats in monitor.read("train").items()
    }
    table = monitor.table()
    monitor.close()
    return Seen(
        layers=() if sample is None else sample.layers,
        steps=[one.step for one in samples],
        heads={name: np.stack([one.heads[name] for one in samples]) for name in samples[0].heads},
        values={name: np.stack([one.values[name] for one in samples]) for name in samples[0].values},
        reads=reads,
        warned=warned,
        losses=losses,
        collectives=counts,
        table=table,
    )


def alone() -> Seen:
    """One process on the global batch."""

    def run(model: nn.Module, step: int) -> float:
        loss = loss_of(model, batch(step))
        loss.backward()
        return float(loss.detach())

    return trained(llama(), run, True)


def watched(setup: str) -> Seen:
    """The setup, with a monitor and without: what it adds is known by the difference."""
    if setup.startswith("pipeline"):
        model, run = pipelined(setup)
        plain, plain_run = pipelined(setup)
        options: dict[str, Any] = {}
    else:
        model, plain = llama(), wrapped(llama(), setup)
        sites = qkeel.find_sites(model, input_ids=batch(0)[:1], use_cache=False)
        model, options = wrapped(model, setup), {"sites": sites}

        def run(model: nn.Module, step: int) -> float:
            loss = loss_of(model, part(setup, step))
            loss.backward()
            return float(loss.detach())

        plain_run = run
    before = trained(plain, plain_run, False)
    seen = trained(model, run, True, **options)
    assert seen.losses == before.losses, "watching changed a loss"
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (a, b))
        assert torch.equal(a, b), "watching changed a weight"
    added = [n - m for n, m in zip(seen.collectives, before.collectives, strict=True)]
    return dataclasses.replace(seen, collectives=added)


@contextmanager
def processes(rank: int, world: int, folder: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    with processes(rank, world, folder):
        for name in names:
            try:
                found: object = watched(name)
            except Exception:
                found = traceback.format_exc()
            (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps(found))
            dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
