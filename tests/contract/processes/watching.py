"""What the processes of a setup measure; see spawn."""

from __future__ import annotations

import dataclasses
import pickle
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.contract.processes.context import Context, hidden, split
from tests.contract.processes.pipelines import layers_of, pipelined
from tests.contract.processes.seen import Seen
from tests.contract.processes.wrapped import BATCH, batch, llama, part, wrapped
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel
from qkeel.errors import QkeelWarning
from qkeel.monitor import Layout, Sample

STEPS = 3
Step = Callable[[nn.Module, torch.optim.Optimizer, int], float]


class Collectives(TorchDispatchMode):
    """Counts the operators by which processes wait for each other, and the numbers that each of them sends."""

    def __init__(self) -> None:
        super().__init__()
        self.n = self.bytes = 0
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.n += 1
            sent = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
            self.sizes.append(min([x.numel() for x in sent], default=0))
            self.bytes += sum(x.numel() * x.itemsize for x in sent)
        return func(*args, **(kwargs or {}))


def trained(model: nn.Module, step_of: Step, monitored: bool, **options: Any) -> Seen:
    """Three steps; what was seen, empty where nothing was monitored."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    counts: list[int] = []
    samples: list[Sample] = []
    monitor = None
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        if monitored:
            monitor = qkeel.watch(model, optimizer, **{"rules": [], **options})
        for step in range(STEPS):
            with Collectives() as counted:
                losses.append(step_of(model, optimizer, step))
            counts.append(counted.n)
            if monitor is not None and monitor.sample is not None:
                samples.append(monitor.sample)
    warned = [str(w.message) for w in record if isinstance(w.message, QkeelWarning)]
    if monitor is None:
        return Seen((), [], {}, {}, {}, warned, losses, counts, "")
    return seen_by(monitor, samples, warned, losses, counts)


def seen_by(
    monitor: Any,
    samples: list[Sample],
    warned: list[str],
    losses: list[float],
    counts: list[int],
) -> Seen:
    """What one monitor has recorded; it is closed."""
    reads = {
        site: {name: x.numpy() for name, x in stats.tensors().items()}
        for site, stats in monitor.read("train").items()
    }
    # What the monitor says of itself is the time and the calls of one process.
    table = "\n".join(
        line for line in monitor.table().splitlines() if not line.startswith("monitor:")
    )
    monitor.close()
    return Seen(
        layers=samples[0].layers if samples else (),
        steps=[one.step for one in samples],
        heads={
            n: np.stack([one.heads[n] for one in samples])
            for n in (samples[0].heads if samples else ())
        },
        values={
            n: np.array([one.values[n] for one in samples])
            for n in (samples[0].values if samples else ())
        },
        reads=reads,
        warned=warned,
        losses=losses,
        collectives=counts,
        table=table,
    )


def loss_of(model: nn.Module, tokens: Tensor, **inputs: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


def passes(setup: str, mine: Callable[[int], Tensor]) -> Step:
    """The forward and backward passes and the step of the optimizer; `mine` gives the tokens of this process."""

    many = dist.is_initialized()

    def masks(tokens: Tensor) -> dict[str, Tensor]:
        """The last quarter of the global batch ends in three padded tokens: those of one process alone."""
        if setup != "ddp_padding":
            return {}
        mask = torch.ones_like(tokens)
        if not many or dist.get_rank() == 1:
            mask[-2:, -3:] = 0
        return {"attention_mask": mask}

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        def closure() -> float:
            micro = (2 * step, 2 * step + 1) if setup == "ddp_no_sync" else (step,)
            total = 0.0
            for i, seed in enumerate(micro):
                alone = isinstance(
                    model, nn.parallel.DistributedDataParallel
                ) and i + 1 < len(micro)
                with model.no_sync() if alone else nullcontext():  # type: ignore[operator]
                    tokens = mine(seed)
                    share = (
                        len(tokens) * dist.get_world_size() / BATCH
                        if setup == "ddp_uneven" and many
                        else 1.0
                    )
                    loss = loss_of(model, tokens, **masks(tokens)) * share / len(micro)
                    loss.backward()
                total += float(loss.detach())
            return total

        if setup == "ddp_closure" and many:
            loss = optimizer.step(closure)  # type: ignore[arg-type]
        else:
            loss = closure()
            optimizer.step()
        optimizer.zero_grad()
        return float(loss)  # type: ignore[arg-type]

    return step_of


def made(setup: str) -> nn.Module:
    model = llama(layers=layers_of(setup))
    if setup == "ddp_checkpointing":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the method's name
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )  # type: ignore[operator]
        model.train()
    return model


OPTIONS: dict[str, dict[str, Any]] = {"ddp_padding": {"query_mask": "attention_mask"}}


def alone(setup: str) -> Seen:
    """One process on the global batch."""
    if setup.startswith("context"):
        return trained(Context(), context_step(hidden), True)
    return trained(made(setup), passes(setup, batch), True, **OPTIONS.get(setup, {}))


def context_step(given: Callable[[int], Tensor]) -> Step:
    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        loss = model(given(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step_of


def prepared(setup: str) -> tuple[nn.Module, Step, dict[str, Any]]:
    """The model of a setup, its step, and the options of watch."""
    if setup.startswith("pipeline"):
        stage, run = pipelined(setup)
        return stage, run, {}
    rank = dist.get_rank()
    if setup.startswith("context"):
        step_of = context_step(lambda step: hidden(step).chunk(2, 1)[rank])
        return split(Context(), setup), step_of, {"layout": Layout(context=rank)}
    model, options = made(setup), OPTIONS.get(setup, {})
    if setup not in ("fsdp2_found", "ddp", "ddp_compile"):
        options = {
            **options,
            "sites": qkeel.find_sites(
                model, {"input_ids": batch(0)[:1], "use_cache": False}
            ),
        }
    return wrapped(model, setup), passes(setup, lambda step: part(setup, step)), options


def watched(setup: str) -> Seen:
    """The setup, with a monitor and without: what it adds is known by the difference."""
    plain, plain_step, _ = prepared(setup)
    before = trained(plain, plain_step, False)
    model, step_of, options = prepared(setup)
    seen = trained(model, step_of, True, **options)
    assert seen.losses == before.losses, "watching changed a loss"
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (a, b))
        assert torch.equal(a, b), "watching changed a weight"
    added = [n - m for n, m in zip(seen.collectives, before.collectives, strict=True)]
    return dataclasses.replace(seen, collectives=added)


def told(folder: Path, name: str) -> None:
    """Leaves what this process has seen of a setup, or the error, in a file."""
    try:
        found: object = watched(name)
    except Exception:
        found = traceback.format_exc()
    path = folder / f"{name}-{dist.get_rank()}.pickle"
    path.write_bytes(pickle.dumps(found))
