"""Layers that mix positions without logits: found by what they do, and in every table by name, without numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.errors import UnknownNameError
from qkeel.monitor import Ceiling, History
from qkeel.records import LINEAR, RunDirectory

M, T = 16, 10


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2)


class Full(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(M, M) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x)) for f in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Linear(Full):
    """Causal linear attention, all positions at once: (q·k) without a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x)) for f in (self.q, self.k, self.v))
        return (torch.tril(q @ k.mT) @ v).transpose(1, 2).flatten(2)


class Delta(Full):
    """The delta rule, one position after the other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x)) for f in (self.q, self.k, self.v))
        k = nn.functional.normalize(k, dim=-1)
        state, out = x.new_zeros(x.shape[0], 2, 8, 8), []
        for t in range(x.shape[1]):
            key, value = k[:, :, t], v[:, :, t]
            error = value - (key[:, :, None] @ state)[:, :, 0]
            state = state + key[..., None] * error[:, :, None]
            out.append((q[:, :, t, None] @ state)[:, :, 0])
        return torch.stack(out, 2).transpose(1, 2).flatten(2)


class Scan(nn.Module):
    """A gated linear recurrence, number by number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(M, M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).sigmoid(), self.b(x)
        state, out = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + b[:, t]
            out.append(state)
        return torch.stack(out, 1)


class Short(nn.Module):
    """A causal convolution over three positions, gated: no layer of this type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(M, M, 3, padding=2), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., : x.shape[1]].mT * self.gate(x)


class Pooled(nn.Module):
    """A gate by products of all positions, earlier and later ones: no layer of this type."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean(1, keepdim=True) @ (x.mT @ x)).sigmoid()


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mixer, self.beside = nn.LayerNorm(M), mixer, beside
        self.mlp = nn.Sequential(nn.Linear(M, 2 * M), nn.GELU(), nn.Linear(2 * M, M))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.mixer(y) + (0 if self.beside is None else self.beside(y))
        return x + self.mlp(x)


class Hybrid(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.inner, self.layers = nn.Linear(M, M), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x


def hybrid() -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(
        *(Block(mixer()) for mixer in (Linear, Delta, Scan, Short, Pooled)), Block(Full()), Block(Full(), Linear())
    )


LAYERS = ("layers.5.mixer", "layers.6.mixer")
WITHOUT = ("layers.0.mixer", "layers.1.mixer", "layers.2.mixer", "layers.6.beside")


def test_layers_are_named_by_what_they_do() -> None:
    sites = qkeel.find_sites(hybrid(), torch.randn(3, T, M))
    assert [(site.name, site.layer_type) for site in sites] == [(name, "full") for name in LAYERS]
    assert sites.linear == WITHOUT
    assert not sites.missed
    assert "linear, without logits: layers.0.mixer" in sites._repr_html_()


def test_too_few_positions_show_nothing() -> None:
    """A short convolution reaches as far as a state then."""
    assert qkeel.find_sites(hybrid(), torch.randn(3, 4, M)).linear == ()


def test_they_are_in_every_table_without_a_number(tmp_path: Path) -> None:
    model = hybrid()
    with qkeel.watch(model, sinks=[tmp_path / "run", f"csv:path={tmp_path / 'csv'}"]) as monitor:
        model(torch.randn(2, T, M))
        sample = monitor.sample
        assert sample is not None
        table = [line.split() for line in monitor.table().splitlines()]
    assert sample.layers == LAYERS
    assert sample.types == dict.fromkeys(LAYERS, "full") | dict.fromkeys(WITHOUT, LINEAR)
    assert all(set(row[2:]) == {"-"} for row in table if row[1:2] == [LINEAR])
    assert [row[0] for row in table if row[1:2] == [LINEAR]] == [*WITHOUT]
    assert all(np.isfinite(x).all() for x in (sample.heads["max_logit"], sample.heads["entropy"]))
    assert not [key for key in sample.summaries() if "/full/" in key or LINEAR in key]
    run = RunDirectory(tmp_path / "run")
    assert run.config()[LINEAR] == [*WITHOUT]
    assert History.read(run).types == sample.types == monitor.history.types
    assert set(monitor.history.frame()["layer"]) == set(LAYERS)
    page = qkeel.report.write([tmp_path / "run"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<td class="text">linear</td>') == len(WITHOUT)
    assert "Layers without logits" in page
    explained = str(qkeel.explain(model, torch.randn(2, T, M)))
    assert "layers.{0-2}.mixer, layers.6.beside\n  type      linear: " in explained


def test_a_rule_cannot_have_a_threshold_for_what_has_no_logits() -> None:
    with pytest.raises(UnknownNameError, match="linear"):
        Ceiling(threshold={LINEAR: 100.0})


def test_models_without_attention_in_lists_have_none() -> None:
    model = nn.Sequential(nn.Linear(M, M), Linear(), Full())
    assert qkeel.find_sites(nn.ModuleDict({"a": model})["a"], torch.randn(2, T, M)).linear == ("1",)
