"""Passes that qkeel makes seed the generators that they put back, and those of no other device."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.attention import Joint, fused_causal
from tests.training import sgd
from torch import nn

import qkeel
from qkeel.capture.random_streams import RandomStreams


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
        optimizer = sgd(model)
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


class Device:
    """Stands for the module of a kind of device, with a state for each of its devices."""

    def __init__(self):
        self.states = {}

    def get_rng_state(self, *device):
        return self.states.setdefault(device, torch.tensor([1]))

    def set_rng_state(self, state, *device):
        self.states[device] = state


@pytest.mark.parametrize(
    ("kind", "devices"), [("cuda", [0, 1]), ("xpu", [0]), ("mps", [None])]
)
def test_generators_of_the_devices_that_hold_tensors_are_put_back(
    kind, devices, monkeypatch
):
    backend = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    tensors = [
        SimpleNamespace(
            device=torch.device(*filter(lambda x: x is not None, (kind, i)))
        )
        for i in devices
    ]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    streams = RandomStreams([*tensors, torch.zeros(1)])
    expected = dict(backend.states)
    assert len(expected) == len(devices)
    assert all(len(key) == (kind != "mps") for key in expected)
    for key in backend.states:
        backend.states[key] = torch.tensor([2])
    torch.rand(1), random.random(), np.random.rand()
    streams.restore()
    assert backend.states == expected
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert (before[2] == after[2]).all()
