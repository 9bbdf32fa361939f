"""The random generators that a pass may use, put back to where they were."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import final

import numpy as np
import torch
from torch import Tensor


@final
class RandomStreams:
    """The states of the random generators of Python, NumPy and torch: that of the CPU, and those of the devices that hold
    some tensors. Generators of other devices are neither kept nor seeded."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._on_cpu = torch.get_rng_state()
        self._on_devices = {
            device: torch.get_device_module(device).get_rng_state(*_index(device))
            for device in _devices_of(tensors)
        }

    def restore(self) -> None:
        """Puts the generators back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._on_cpu)
        for device, state in self._on_devices.items():
            _set_state(device, state)


def seed_generators(tensors: Iterable[Tensor]) -> None:
    """Seeds torch's generators of the CPU and of the devices that hold some tensors, each as a new one is seeded with 0;
    torch.manual_seed would seed those of every device."""
    torch.default_generator.manual_seed(0)
    for device in _devices_of(tensors):
        _set_state(device, torch.Generator(device).manual_seed(0).get_state())


def _devices_of(tensors: Iterable[Tensor]) -> set[torch.device]:
    return {x.device for x in tensors if x.device.type not in ("cpu", "meta")}


def _set_state(device: torch.device, state: Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # Apple's GPUs are a single device.
    return () if device.type == "mps" else (device,)
