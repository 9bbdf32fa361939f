"""`qkeel check module:function`: a model that runs, judged on the command line."""

import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from qkeel.cli.app import main

SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.embed, self.qkv, self.causal = nn.Embedding(20, 16), nn.Linear(16, 48), causal

    def forward(self, tokens, position_ids=None):
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)

def batch():
    return {"tokens": torch.randint(20, (2, 9)), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)}

def causal():
    return Model(True), batch()

def leaky():
    return Model(False), batch()

def broken():
    return Model(True), torch.rand(2, 9)

def nothing():
    return None
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"checked_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("function", "sees", "code"),
    [
        ("causal", None, 1),  # its documents see each other
        ("causal", "causal", 0),
        ("leaky", "causal", 1),
        ("causal", "documents", 1),
        ("causal", "window=9", 4),  # nine tokens are too few to try it
        ("causal", "window=3", 1),
        ("causal", "left", 2),
        ("nothing", "causal", 2),
        ("broken", "causal", 2),  # a crash is not a model that is not healthy
        ("missing", "causal", 2),
    ],
)
def test_a_model_is_judged_with_an_exit_code(module, function, sees, code):
    assert (
        main(["check", f"{module}:{function}", *(["--sees", sees] if sees else [])])
        == code
    )


def test_sees_needs_a_model_and_a_module_that_is_there(module, tmp_path):
    assert main(["check", str(tmp_path), "--sees", "causal"]) == 2
    assert main(["check", f"not_{module}:causal"]) != 0


def test_the_attention_of_a_model_is_drawn(module, tmp_path, capsys, monkeypatch):
    drawn = []

    def draw(maps, out, **settings):
        drawn.append((maps, out, settings))
        return [out / "attention.pdf"]

    monkeypatch.setattr("qkeel.cli.report.draw", draw)
    monkeypatch.setattr("qkeel.cli.report.check_settings", lambda formats, width: None)
    assert main(["figures", f"{module}:causal", "--formats", "pdf"]) == 0
    assert capsys.readouterr().out.split() == ["causal-figures/attention.pdf"]
    ((maps, out, settings),) = drawn
    assert (out, settings["formats"]) == (Path("causal-figures"), ["pdf"])
    assert torch.equal(maps[""].triu(1), torch.zeros(2, 2, 9, 9))
    assert_close(maps[""].sum(-1), torch.ones(2, 2, 9))
    assert main(["figures", f"{module}:causal", "--layers", "h.0"]) == 2
    assert main(["figures", f"{module}:broken"]) == 2
    assert main(["figures", str(tmp_path), "--layers", "h.0"]) == 2
    assert len(drawn) == 1


def test_settings_of_figures_are_refused_before_the_model_is_built(module, capsys):
    assert main(["figures", f"{module}:nothing", "--width", "0"]) == 2
    assert "width" in capsys.readouterr().err
