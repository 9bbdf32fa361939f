"""Remedies on several processes against one process on the global batch: what each of the processes does.

python -m tests.remedies.on_processes RANK WORLD STORE SETUP…
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from tests.processes import wrapped
from tests.processes.pipelines import pipelined
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import qkeel
from qkeel import dist
from qkeel.errors import RefusedError

STEPS = 10
LR = 1e-2
# On steps, by what each is called with; thresholds low enough for half of the heads to be clipped.
ON_STEPS = (
    "lalr:tau=0.3",
    "qk_lr:factor=0.3",
    "qk_weight_decay:decay=1",
    "qk_clip:threshold=0.02",
    "qk_clip:threshold=0.02,groups=group",
    "lalr:tau=0.3,decay=plain+qk_weight_decay:decay=1+qk_clip:threshold=0.03",
)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): dist.whole(p).detach().clone() for n, p in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, setup: str, steps: range = range(STEPS)) -> None:
    for step in steps:
        tokens = wrapped.batch(step) if setup == "one" else wrapped.part(setup, step)
        loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(remedy: str, setup: str) -> dict[str, Tensor]:
    """The weights after ten steps under a remedy, which is applied after wrapping to sites that were found before."""
    model = wrapped.llama()
    sites = qkeel.find_sites(model, wrapped.batch(0)[:2])
    if setup != "one":
        model = wrapped.wrapped(model, setup)
    optimizer = adamw(model)
    with qkeel.apply(remedy, model, optimizer, sites=sites):
        train(model, optimizer, setup)
    return weights(model)


def trained_stage(remedy: str, setup: str) -> dict[str, Tensor]:
    """The same of this process's stage of a pipeline, by the names of the whole model."""
    stage, run = pipelined(setup)
    hidden = torch.rand(2, wrapped.TOKENS, wrapped.WIDTH, dtype=torch.float64)
    optimizer = adamw(stage)
    with qkeel.apply(remedy, stage, optimizer, example=hidden if dist.rank() else wrapped.batch(0)[:2]):
        for step in range(STEPS):
            run(stage, step)
            optimizer.step()
            optimizer.zero_grad()
    names = {id(p): n for n, p in stage.named_parameters()}
    return {names[id(p)].replace("layers.0", f"model.layers.{dist.rank()}"): p.detach() for p in stage.parameters()}


def farthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of weights of the same name, of which there are some."""
    both = a.keys() & b.keys()
    assert len(both) > 5
    return max(float((a[name] - b[name]).abs().max()) for name in both)


def refused(setup: str, remedy: str) -> str:
    model = wrapped.llama()
    sites = qkeel.find_sites(model, wrapped.batch(0)[:2])
    model = wrapped.wrapped(model, setup)
    try:
        qkeel.apply(remedy, model, adamw(model), sites=sites)
    except RefusedError as error:
        return str(error)
    return ""


def main(rank: int, world: int, store: str, setups: list[str]) -> None:
    torch.set_num_threads(1)
    alone = {
        remedy: trained(remedy, "one") for remedy in ON_STEPS if __import__("os").environ.get("ONLY", "") in remedy
    }
    plain = trained("none", "one")
    for remedy, found in alone.items():
        assert farthest(found, plain) > 1e-4, remedy  # it does something
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for setup in setups:
        for remedy, expected in alone.items():
            found = (trained_stage if setup.startswith("pipeline") else trained)(remedy, setup)
            print(setup, remedy, f"{farthest(found, expected):.1e}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
