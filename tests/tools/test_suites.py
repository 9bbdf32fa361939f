"""The suites of peers: what they compare would show a fault, and qkeel really takes part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("expecttest")  # which torch's own tests need

import torch
from tools.suites import __main__ as suites
from tools.suites import operator_samples, optimizers

import qkeel
from qkeel.handle import Handle
from qkeel.nn import functional_attention

MODEL = """
import torch
from transformers import LlamaConfig, LlamaModel


def test_a_model_runs():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaModel(LlamaConfig(vocab_size=9, **sizes))
    assert model(torch.zeros(1, 4, dtype=torch.long)).last_hidden_state.isfinite().all()
    assert model.config._attn_implementation == "sdpa"  # fails with qkeel, as one of transformers' own does
"""


def test_samples_of_torch_are_those_of_torchs_function() -> None:
    first = list(itertools.islice(operator_samples.checks(), 60))
    assert {check.what for check in first} == {"outputs", "strides", "gradients"}
    assert [check for check in first if check.difference] == []


def test_a_sample_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: Any, **kwargs: Any) -> torch.Tensor:
        return functional_attention(*args, **kwargs).mT.contiguous().mT + 0.01

    monkeypatch.setattr(operator_samples, "functional_attention", off)
    found = list(itertools.islice(operator_samples.checks(), 60))
    assert {"outputs", "strides"} <= {check.what for check in found if check.difference}


def test_an_optimizer_whose_clip_does_nothing_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict() -> str:
        return optimizers._verdict(torch.optim.SGD, "SGD", "", {"lr": 1.0}, "qk_clip").verdict

    assert verdict() == "right"
    monkeypatch.setattr(qkeel, "apply", lambda *_, **__: Handle(lambda: None), raising=False)
    assert verdict() == "wrong"


@pytest.mark.slow
def test_models_are_run_as_they_are_with_qkeel_and_watched(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "tests" / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "test_modeling_toy.py").write_text(MODEL)
    out = tmp_path / "page.md"
    given = ["--transformers", str(tmp_path), "--families", "toy", "--only", "transformers", "--out", str(out)]
    assert suites.main(given) == 1
    rows = [line for line in out.read_text().splitlines() if line.startswith("| toy")]
    assert [row.split(" | ")[1] for row in rows] == ["1", "1"]
    assert [row.split(" | ")[3] for row in rows] == ["0", "1"]
    assert "1 calls of qkeel's attention" in rows[0]
    assert "1 watched calls of models" in rows[1]
    (folder / "test_modeling_toy.py").write_text("".join(f"def test_{i}(): assert {i}\n" for i in range(9)))
    assert suites.main([*given, "--most", "3"]) == 0
    rows = [line for line in out.read_text().splitlines() if line.startswith("| toy")]
    assert [row.split(" | ")[1] for row in rows] == ["2", "2"]  # of 0, 3 and 6 the first fails in any case
