"""Watching a compiled model changes no bit, and no graph, break or recompilation comes on top."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("transformers")

from tests.monitor.compiled import compare
from tests.monitor.families import FAMILIES

from qkeel import watch


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore:The .grad attribute"
)
@pytest.mark.parametrize("name", ["torch_encoder"])  # the others: slow, by the default backend
def test_compiled_steps_are_the_unwatched_ones(name: str) -> None:
    compare(name, "aot_eager", 15)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend of torch.compile needs g++ on CPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_steps_compiled_by_the_default_backend_are_the_unwatched_ones(name: str) -> None:
    # A process of its own: without the run-time type checks, which are Python that can't be compiled.
    command = [sys.executable, "-m", "tests.monitor.compiled", name, "inductor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore:The .grad attribute"
)
def test_a_compiled_optimizer_step_compiles_nothing_of_the_monitor() -> None:
    def run(watched: bool) -> tuple[Tensor, int, int]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
        monitor = watch(model, optimizer) if watched else None
        for i in range(4):
            model(torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(i))).sum().backward()
            step()
        assert monitor is None or monitor.history.steps.tolist() == [0, 1, 2, 3]
        return model.q.weight.detach(), counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]

    (plain, graphs, ops), (seen, graphs_watched, ops_watched) = run(False), run(True)
    assert torch.equal(plain, seen)
    assert (graphs, ops) == (graphs_watched, ops_watched)
