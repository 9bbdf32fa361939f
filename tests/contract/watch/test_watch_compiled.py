"""Watching a compiled model changes no bit, and no graph, break or recompilation comes on top."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("transformers")

from tests.contract.watch.compiled import compare
from tests.contract.watch.families import FAMILIES
from tests.contract.watch.small import Block
from tests.each_row import each_row

from qkeel import find_sites, watch

PASSES: list[str] = []


@torch.library.custom_op("qkeel_tests::noted", mutates_args=())
def noted(x: Tensor, how: str) -> Tensor:
    """A copy of x; notes that what it is in has run once more."""
    PASSES.append(how)
    return x.clone()


noted.register_fake(lambda x, how: torch.empty_like(x))
noted.register_autograd(lambda ctx, grad: (grad, None))


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::DeprecationWarning:torch",
    "ignore:The .grad attribute",
)
@pytest.mark.parametrize(
    "name", ["torch_encoder"]
)  # the others: slow, by the default backend
def test_compiled_steps_are_the_unwatched_ones(name: str) -> None:
    compare(name, "aot_eager", 15)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="the default backend of torch.compile needs g++ on CPU",
)
@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_steps_compiled_by_the_default_backend_are_the_unwatched_ones(
    name: str,
) -> None:
    # A process of its own: without the run-time type checks, which are Python that can't be compiled.
    command = [sys.executable, "-m", "tests.contract.watch.compiled", name, "inductor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::DeprecationWarning:torch",
    "ignore:The .grad attribute",
)
@each_row("parts", [False, True], ids=["the model", "its layers"])
def test_a_measured_step_is_one_eager_pass_more_and_any_other_step_nothing(
    parts: bool,
) -> None:
    """Counted: passes, graphs, graph breaks; a recompilation is an error."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(
                noted(x, "compiled" if torch.compiler.is_compiling() else "eager")
            )

    def run(every: int | None) -> tuple[list[list[str]], list[Tensor], tuple[int, int]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model: Any = nn.Sequential(Layer(), Layer())
        batches = torch.randn(5, 1, 3, 8)
        sites = find_sites(model, batches[0])
        if parts:
            for layer in model:
                layer.compile(backend="aot_eager", fullgraph=True)
        else:
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        # Larger rates diverge, on some processors to NaN, which equals nothing.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        monitor = (
            None if every is None else watch(model, optimizer, every=every, sites=sites)
        )
        passes = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            for x in batches:
                PASSES.clear()
                # With a gradient, as what enters the second layer has one: both are one graph.
                model(x.clone().requires_grad_()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                passes.append(PASSES.copy())
        assert monitor is None or monitor.history.steps.tolist() == [0, 3]
        made = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return passes, [p.detach() for p in model.parameters()], made

    (plain, weights, made), (watched, same, made_watched) = run(None), run(3)
    once, measured = ["compiled"] * 2, ["eager"] * 2 + ["compiled"] * 2
    assert plain == [once] * 5
    assert watched == [measured, once, once, measured, once]
    assert all(map(torch.equal, weights, same))
    assert made == made_watched
    assert made[1] == 0
