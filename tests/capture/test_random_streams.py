"""Passes that qkeel makes seed the generators that they put back, and those of no other device."""

from __future__ import annotations

import pytest
import torch
from tests.attention import Joint, fused_causal
from torch import nn

import qkeel


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [Joint(fused_causal, 16, 2) for _ in range(3)]
    return nn.Sequential(*layers, nn.Dropout(0.1))


@pytest.mark.parametrize("ask", ["find_sites", "check", "attention_maps", "watch"])
def test_no_generator_of_another_device_is_seeded(ask, model, monkeypatch):
    devices = []
    for backend in (torch.cuda, torch.mps, torch.xpu):
        name = "manual_seed" if backend is torch.mps else "manual_seed_all"
        # The compiler keeps tables of torch's functions, in which none may stand twice.
        monkeypatch.setattr(backend, name, lambda seed: devices.append(seed))
    x = torch.randn(2, 8, 16)
    before = torch.get_rng_state()
    if ask == "watch":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with qkeel.watch(model, optimizer, probe_batch=x):
            before = torch.get_rng_state()
            model(x)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            nn.functional.dropout(x, 0.1)
            assert torch.equal(torch.get_rng_state(), after)
    else:
        getattr(qkeel, ask)(model, x, **({"sees": "causal"} if ask == "check" else {}))
        assert torch.equal(torch.get_rng_state(), before)
    assert devices == []
