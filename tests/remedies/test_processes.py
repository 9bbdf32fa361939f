"""Processes that train together clip by the same maxima: replicas stay replicas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qkeel
from qkeel import dist
from qkeel.errors import RefusedError

from .models import attention


@pytest.mark.slow
def test_two_replicas_end_as_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    commands = [[sys.executable, "-m", "tests.remedies.processes", str(r), str(tmp_path / "store")] for r in (0, 1)]
    both = [
        subprocess.Popen(c, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands
    ]
    for process in both:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out
        assert out.endswith("well\n")


def test_a_head_is_clipped_by_the_largest_logit_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "world", lambda: 2)
    monkeypatch.setattr(dist, "agree", lambda name, word: "together")
    others = torch.tensor([0.0, 80.0, -torch.inf, 3.0], dtype=torch.float64)
    monkeypatch.setattr(dist, "gather", lambda own: torch.stack([own, others]))
    model = attention(torch.float64, 4)
    before = model.q_proj.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.apply("qk_clip:threshold=20", model, optimizer):
        model(torch.randn(1, 5, 16, dtype=torch.float64))
        optimizer.step()
        optimizer.step()  # this process saw nothing, the other did
    ratio = (model.q_proj.weight / before)[::4, 0]
    assert torch.allclose(ratio, torch.tensor([1, 0.25, 1, 1], dtype=torch.float64))


@pytest.mark.parametrize(("verdict", "why"), [("alone", "do not all apply it"), ("apart", "hold different attention")])
def test_processes_that_would_part_are_refused(verdict: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "world", lambda: 2)
    monkeypatch.setattr(dist, "agree", lambda name, word: verdict)
    model = attention(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(RefusedError, match=why):
        qkeel.apply("qk_clip", model, optimizer)
    assert not optimizer._optimizer_step_post_hooks
    assert not model.observers
