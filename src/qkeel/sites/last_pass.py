"""The training pass of a model that was seen last: its arguments and its setting, to make it once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from qkeel.patching.modes import Args


@final
class LastPass:
    """The arguments of a pass, without the graph that made them, and whether it ran under autocast.

    They are kept, not copied: until the next training pass begins, or the tap is removed, the tensors of one batch stay
    alive. A loop that keeps its batch until it has the next one needs no more memory for that.
    """

    def __init__(self, model: nn.Module, args: Args, kwargs: Mapping[str, object]) -> None:
        self.args = tuple(map(_detached, args))
        self.kwargs = {name: _detached(value) for name, value in kwargs.items()}
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._device = device if torch.amp.is_autocast_available(device) else "cpu"  # the meta device has none
        self._cast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

    @contextmanager
    def setting(self, model: nn.Module) -> Iterator[None]:
        """While it lasts the model is in training mode, under the autocast of the pass."""
        modes = [(module, module.training) for module in model.modules()]
        enabled, dtype = self._cast
        if not model.training:
            model.train()
        try:
            with torch.autocast(self._device, dtype=dtype, enabled=enabled):
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def _detached(value: object) -> object:
    if type(value) is dict:
        return {name: _detached(part) for name, part in value.items()}
    if type(value) is list:
        return [_detached(part) for part in value]
    if type(value) is tuple:
        return tuple(_detached(part) for part in value)
    return value.detach() if isinstance(value, Tensor) else value
