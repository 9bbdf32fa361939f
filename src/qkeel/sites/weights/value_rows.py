"""The rows of the weights that make the values of each head: seen in one pass, where attention meets them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn

from qkeel.patching.forward_passes import extra_pass
from qkeel.patching.modes import Args, Function, FunctionMode, Kwargs, function_name
from qkeel.sites.calls.head_layout import fewest_keys
from qkeel.sites.kept_state import copied, undisturbed
from qkeel.sites.probe import forward
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.site import HeadSlice
from qkeel.sites.weights.autograd_walk import names_of
from qkeel.sites.weights.head_rows import UnknownRowsError, side

_PRODUCTS = ("matmul", "bmm")


def value_slices(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, tuple[HeadSlice, ...] | str]:
    """For each site of a forward pass the last weights on the path of its values, or why they are unknown.

    Values are what F.scaled_dot_product_attention gets as such, or what the weights of a softmax are multiplied by,
    as [b g s d].
    """
    with extra_pass(model), torch.inference_mode(False), torch.enable_grad(), undisturbed(model):
        seen = _Values(model)
        forward(model, seen, copied(args), copied(dict(kwargs)))
        names = names_of(model)
        return {name: _slices(sighting, seen.values.get(name), names) for name, sighting in seen.sightings.items()}


def _slices(sighting: Sighting, v: Tensor | None, names: dict[int, str]) -> tuple[HeadSlice, ...] | str:
    if v is None or v.ndim != 4:
        return "no product of its weights with values [b h s d] was seen"
    try:
        found = side(fewest_keys(v), sighting.frame, names, "v")
        return tuple(found.slices(path, path.dims)[-1] for path in found.paths)
    except UnknownRowsError as error:
        return str(error)


@final
class _Values(FunctionMode):
    """A mode that notes the values of each attention call, the first of each site.

    An Interceptor inside it reports the call, by its name; this one sees what comes with it, or next: from the softmax
    on it follows tensors of the weights' shape to the first product that they are the left factor of.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sightings: dict[str, Sighting] = {}
        self.values: dict[str, Tensor] = {}
        self._watcher = Interceptor(model, self._note, probing=True)
        self._open: dict[int, tuple[str, Tensor]] = {}
        self._now: str | None = None

    def begin(self, undo: ExitStack) -> None:
        undo.callback(self._open.clear)
        undo.enter_context(self._watcher)

    def _note(self, sighting: Sighting) -> None:
        self.sightings.setdefault(sighting.name, sighting)
        self._now = sighting.name

    def wanted(self, function: Function, args: Args, kwargs: Kwargs) -> bool:
        """Every call; those of the Interceptor inside come in between."""
        self._now = None
        return True

    def saw(self, function: Function, args: Args, kwargs: Kwargs, out: object, more: None) -> None:
        """Follows what the function computed."""
        name = function_name(function)
        if self._now is not None and name == "scaled_dot_product_attention":
            self.values.setdefault(self._now, kwargs["value"] if "value" in kwargs else args[2])
        elif isinstance(out, Tensor) and args and isinstance(args[0], Tensor):
            self._follow(name, args[0], args[1:], out)

    def _follow(self, name: str, x: Tensor, rest: Args, out: Tensor) -> None:
        site = self._now
        if site is None:
            known = self._open.get(id(x))
            if known is None:
                return
            site = known[0]
        if name in _PRODUCTS and rest and self._now is None:
            self.values.setdefault(site, rest[0])
        elif out.shape == x.shape:
            self._open[id(out)] = (site, out)  # held, so that no other tensor gets its number
