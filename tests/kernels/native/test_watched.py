"""Who watches own modules gets largest logits and entropies from the kernel that attends, and no bit changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.functional.statistics import LogitStats
from qkeel.kernels import statistics
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.statistics import logit_stats, stats_of_rows
from qkeel.nn import Attention
from qkeel.ops import KERNELS, run
from qkeel.spec import ALiBi, AttentionSpec, Softcap
from qkeel.spec.call import AttentionCall, make_call, with_query_mask

pytestmark = pytest.mark.usefixtures("library")
FOUND = ("max_logit", "capped_max_logit", "entropy", "entropy_min")
SPECS = {name: qkeel.preset(name) for name in ("baseline", "qwen3", "gemma2")}
SPECS["alibi"] = AttentionSpec(position=ALiBi())
CASES = Path(__file__).parents[2] / "compile" / "cases.py"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of passes over logits that are made for nothing but statistics."""
    made: list[str] = []

    def counted(name: str) -> Any:
        inner = getattr(statistics, name)
        return lambda *args: (made.append(name), inner(*args))[1]

    monkeypatch.setattr("qkeel.capture.calls.logit_stats", counted("logit_stats"))
    monkeypatch.setattr("qkeel.capture.calls.max_stats", counted("max_stats"))
    monkeypatch.setattr("qkeel.monitor.call_statistics.call_rows", counted("call_rows"))
    return made


def agree(found: LogitStats, exact: LogitStats, **tolerance: float) -> None:
    for name in FOUND:
        torch.testing.assert_close(
            getattr(found, name), getattr(exact, name), check_dtype=False, **tolerance
        )
    assert found.n_queries.tolist() == exact.n_queries.tolist()
    assert not found.n_pairs.any()


def in_the_kernel(call: AttentionCall) -> tuple[Tensor, LogitStats]:
    kernel = KERNELS["native"]
    assert isinstance(kernel, Native)
    out, rows = kernel.with_rows(call)
    assert not any(x.requires_grad for x in rows)
    return out, stats_of_rows(call, rows)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("t", [7, 129])
def test_what_is_found_is_what_a_pass_of_its_own_finds(name: str, t: int) -> None:
    torch.manual_seed(t)
    q, k = 3 * torch.randn(2, 4, t, 16, requires_grad=True), torch.randn(2, 2, t, 16)
    params, mask = SPECS[name].init_params(4, 2, 16), torch.rand(2, 1, t, t) < 0.7
    call = make_call(SPECS[name], q, k, k, params=params, mask=mask)
    for seen in (call, with_query_mask(call, torch.rand(2, t) < 0.5)):
        out, found = in_the_kernel(seen)
        assert torch.equal(out, run(seen, "native"))
        agree(found, logit_stats(seen), rtol=1e-5, atol=1e-5)


def test_heads_that_see_nothing_are_empty_and_nan_shows() -> None:
    q = torch.randn(1, 2, 5, 8)
    none = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    nothing = in_the_kernel(
        make_call(AttentionSpec(cap=Softcap(5.0)), q, q, q, mask=none)
    )[1]
    assert (
        nothing.max_logit.tolist()
        == nothing.capped_max_logit.tolist()
        == [-torch.inf] * 2
    )
    assert nothing.entropy.tolist() == [0.0] * 2
    assert nothing.n_queries.tolist() == [0, 0]
    q[:, 1, 2] = torch.nan
    for mask in (None, ~none):
        call = make_call(AttentionSpec(), q, q, q, mask=mask)
        seen, largest = (
            in_the_kernel(call)[1],
            qkeel.attention(q, q, q, spec=call.spec, mask=mask, stats="max")[1],
        )
        for x in (seen.max_logit, seen.entropy, largest.max_logit, largest.entropy):
            assert x.isnan().tolist() == [False, True]


class Model(nn.Module):
    """Two attentions, one after the other; `again` computes them again in backward."""

    def __init__(self, impl: str = "native", again: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.layers = nn.ModuleList(
            Attention(32, 4, 2, spec=qkeel.preset("qwen3"), impl=impl) for _ in range(2)
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + (
                layer(x)
                if self.again is None
                else checkpoint(layer, x, use_reentrant=self.again)
            )
        return x


class Trained:
    """Three watched steps of two batches each: the monitor and every bit of the run."""

    def __init__(
        self, stats: Any, model: nn.Module | None = None, **options: Any
    ) -> None:
        self.model = Model() if model is None else model
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.bits: list[Tensor] = []
        self.monitor: Any = None
        if stats is not None:
            self.monitor = qkeel.watch(self.model, optimizer, stats=stats, **options)
        torch.manual_seed(1)
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(2, 50, 32, requires_grad=True)
                loss = (
                    self.model(x, attention_mask=torch.rand(2, 50) < 0.7)
                    .square()
                    .mean()
                )
                loss.backward()
                assert x.grad is not None
                self.bits += [loss.detach(), x.grad]
            self.bits += [p.grad for p in self.model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        self.bits += [p.detach() for p in self.model.parameters()]
        if self.monitor is not None:
            self.monitor.remove()

    def same(self, other: Trained) -> bool:
        return len(self.bits) == len(other.bits) and all(
            map(torch.equal, self.bits, other.bits)
        )


@pytest.mark.parametrize("again", one_in([None, True, False], 2))
@pytest.mark.parametrize("mask", [None, "attention_mask"])
def test_maxima_cost_no_pass_and_change_no_bit(
    passes: list[str], mask: str | None, again: bool | None
) -> None:
    plain = Trained(None, Model(again=again))
    full = Trained(True, Model(again=again), query_mask=mask)
    assert len(passes) == 3 * 2 * 2
    passes.clear()
    seen = Trained("max", Model(again=again), query_mask=mask)
    assert not passes
    assert seen.same(plain)
    assert full.same(plain)
    exact, found = full.monitor.read(), seen.monitor.read()
    assert list(found) == list(exact) == ["layers.0", "layers.1"]
    for name in exact:
        logits = found[name].max_logit, exact[name].max_logit
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_maxima_of_other_kernels_take_a_pass(passes: list[str]) -> None:
    seen = Trained("max", Model("sdpa")).monitor.read()
    assert passes == ["max_stats"] * (3 * 2 * 2)
    assert all(bool(stats.max_logit.isfinite().all()) for stats in seen.values())


def test_qk_clip_takes_its_maxima_from_the_kernel(passes: list[str]) -> None:
    weights = []
    for impl in ("chunked", "native"):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(32, 4, impl=impl))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = 5 * torch.randn(2, 30, 32)
        with qkeel.watch(model) as monitor, torch.no_grad():
            model(x)
            (stats,) = monitor.read().values()
        before = model.get_parameter("0.q_proj.weight").detach().clone()
        with qkeel.apply(
            model,
            f"qk_clip:threshold={float(stats.max_logit.median())}",
            optimizer,
            batch=x,
        ):
            passes.clear()
            model(x).sum().backward()
            optimizer.step()
        weights.append(model.get_parameter("0.q_proj.weight").detach().clone())
        assert not torch.equal(weights[-1], before)
        assert passes == ([] if impl == "native" else ["max_stats"])
    torch.testing.assert_close(*weights)


@pytest.mark.slow
def test_a_compiled_model_is_watched_without_a_pass_of_statistics_and_without_another_graph() -> (
    None
):
    command = [sys.executable, str(CASES), "watched", "qwen3", "native", "aot_eager"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "QKEEL_NATIVE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout) == 0
