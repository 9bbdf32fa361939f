"""Weights that are there only while their module runs, as ZeRO's stage 3 keeps them: logits are measured, weights are not."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tests.attention import Attention
from tests.training import sgd
from torch import nn

import qkeel
from qkeel.errors import RefusedError


class Engine(nn.Module):
    """Holds each weight while its own module runs, and all of them in the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self._whole = {p: p.data for p in module.parameters()}
        for inner in module.modules():
            inner.register_forward_pre_hook(lambda m, _: self._fill(m, recurse=False))
            inner.register_forward_hook(lambda m, *_: self._empty(m))
        module.register_forward_hook(lambda m, *_: self._fill(m, recurse=True))

    def zero_optimization_stage(self):
        return 3

    def _fill(self, module, recurse):
        for p in module.parameters(recurse):
            p.data = self._whole[p]

    def _empty(self, module):
        for p in module.parameters(recurse=False):
            p.data = p.data[:0]

    def step(self):
        for p in self.module.parameters():
            p.grad = None
            p.data = p.data[:0]

    def forward(self, x):
        return self.module(x)


@pytest.fixture
def zero_3(monkeypatch):
    engines = SimpleNamespace(DeepSpeedEngine=Engine)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", engines)


def trained(model, call, optimizer):
    """Two steps at a rate of 0, watched."""
    with qkeel.watch(model, optimizer, rules=[]) as monitor:
        for step in range(2):
            seed = torch.Generator().manual_seed(step)
            call(torch.randn(2, 6, 16, generator=seed)).square().mean().backward()
            optimizer.step()
            if isinstance(call, Engine):
                call.step()
        return monitor.sample, monitor.sites


@pytest.mark.usefixtures("zero_3")
@pytest.mark.parametrize("watched", ["model", "engine"])
def test_logits_are_exact_and_weights_are_left_out(watched):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(m=16), Attention(m=16))
    optimizer = sgd(model, 0.0)
    expected, _ = trained(model, model, optimizer)
    engine = Engine(model)
    flat = nn.Parameter(torch.zeros(3))
    engine.step()
    with pytest.warns(qkeel.errors.QkeelWarning, match="flat pieces") as warned:
        sample, sites = trained(
            engine if watched == "engine" else model,
            engine,
            torch.optim.SGD([flat], lr=0.0),
        )
    assert len(warned) == 1
    assert {"max_logit", "entropy"} <= {*sample.heads}
    for name, numbers in sample.heads.items():
        assert numbers.tolist() == expected.heads[name].tolist(), name
    assert not any("weight" in name or "grad_" in name for name in sample.heads)
    assert [site.n_heads for site in sites] == [2, 2]
    assert not any(site.terms for site in sites)


@pytest.mark.usefixtures("zero_3")
def test_what_needs_weights_is_refused():
    model = nn.Sequential(Attention(m=16))
    engine = Engine(model)
    optimizer = sgd(model)
    for remedy in ("qk_clip", "lalr"):
        with pytest.raises(RefusedError, match="stage 3"):
            qkeel.apply(model, remedy, optimizer)
    with pytest.raises(RefusedError, match="nan=True"):
        qkeel.watch(engine, optimizer, nan=True)
