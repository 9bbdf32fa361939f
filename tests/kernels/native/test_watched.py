"""Who watches own modules gets largest logits from the kernel that attends, and no bit changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.training import adamw, sgd, step
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.kernels import statistics
from qkeel.nn import Attention

pytestmark = pytest.mark.usefixtures("library")
CASES = Path(__file__).parents[2] / "compile" / "cases.py"


@pytest.fixture
def passes(monkeypatch):
    """The names of passes over logits that are made for nothing but statistics."""
    names = []

    def counted(name):
        inner = getattr(statistics, name)
        return lambda *args: (names.append(name), inner(*args))[1]

    monkeypatch.setattr("qkeel.capture.calls.logit_stats", counted("logit_stats"))
    monkeypatch.setattr("qkeel.capture.calls.max_stats", counted("max_stats"))
    monkeypatch.setattr("qkeel.monitor.call_statistics.call_rows", counted("call_rows"))
    return names


class Model(nn.Module):
    """Two attentions, one after the other, recomputed in backward."""

    def __init__(self, impl="native"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            Attention(32, 4, 2, spec=qkeel.preset("qwen3"), impl=impl) for _ in range(2)
        )

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def trained(stats, impl="native", **options):
    """Statistics and every bit of three watched steps of two batches each."""
    model = Model(impl)
    optimizer = adamw(model, 0.01)
    monitor = None
    if stats is not None:
        monitor = qkeel.watch(model, optimizer, stats=stats, **options)
    torch.manual_seed(1)
    bits = []
    for _ in range(3):
        for _ in range(2):
            x, mask = torch.randn(2, 50, 32), torch.rand(2, 50) < 0.7
            loss = model(x, attention_mask=mask).square().mean()
            loss.backward()
            bits.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    found = {} if monitor is None else monitor.read()
    return found, [*bits, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("mask", [None, "attention_mask"])
def test_maxima_cost_no_pass_and_change_no_bit(passes, mask):
    exact, bits_of_all = trained(True, query_mask=mask)
    assert len(passes) == 3 * 2 * 2
    passes.clear()
    largest, bits = trained("max", query_mask=mask)
    assert not passes
    plain = trained(None)[1]
    assert all(map(torch.equal, bits, plain))
    assert all(map(torch.equal, bits_of_all, plain))
    assert list(largest) == list(exact) == ["layers.0", "layers.1"]
    for name in exact:
        logits = largest[name].max_logit, exact[name].max_logit
        assert_close(*logits, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_qk_clip_takes_its_maxima_from_the_kernel(passes):
    weights, x = [], 5 * torch.randn(2, 30, 32)
    for impl in ("chunked", "native"):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(32, 4, impl=impl))
        optimizer = sgd(model, 0.0)
        before = model.get_parameter("0.q_proj.weight").detach().clone()
        with qkeel.apply(model, "qk_clip:threshold=1.0", optimizer, batch=x):
            passes.clear()
            step(model, optimizer, x)
        weights.append(model.get_parameter("0.q_proj.weight").detach())
        assert not torch.equal(weights[-1], before)
        assert passes == ([] if impl == "native" else ["max_stats"])
    assert_close(*weights)


@pytest.mark.slow
def test_a_compiled_model_is_watched_without_another_pass_or_graph():
    command = [sys.executable, str(CASES), "watched", "qwen3", "native", "aot_eager"]
    environment = {**os.environ, "QKEEL_NATIVE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout) == 0
