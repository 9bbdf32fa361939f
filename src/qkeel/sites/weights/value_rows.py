"""The rows of the weights that make the values of each head: seen in one pass, where attention meets them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkeel.patching.forward_passes import extra_pass
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.calls.head_layout import fewest_keys
from qkeel.sites.kept_state import copied, undisturbed
from qkeel.sites.probe import forward
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.site import HeadSlice
from qkeel.sites.weights.autograd_walk import names_of
from qkeel.sites.weights.head_rows import UnknownRowsError, side


def value_slices(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, tuple[HeadSlice, ...] | str]:
    """For each site of a forward pass the last weights on the path of its values, or why they are unknown.

    Values are what F.scaled_dot_product_attention gets as such, or what the weights of a softmax are multiplied by,
    as [b g s d].
    """
    with extra_pass(model), torch.inference_mode(False), torch.enable_grad(), undisturbed(model):
        firsts: dict[str, Sighting] = {}

        def note(sighting: Sighting) -> None:
            firsts.setdefault(sighting.name, sighting)

        watcher = Interceptor(model, note, probing=True)
        watcher.values = values = dict[str, Tensor]()
        forward(model, watcher, copied(args), copied(dict(kwargs)))
        names = names_of(model)
        return {name: _slices(sighting, values.get(name), names) for name, sighting in firsts.items()}


def _slices(sighting: Sighting, v: Tensor | None, names: dict[int, str]) -> tuple[HeadSlice, ...] | str:
    if v is None or v.ndim != 4:
        return "no product of its weights with values [b h s d] was seen"
    try:
        found = side(fewest_keys(v), sighting.frame, names, "v")
        return tuple(found.slices(path, path.dims)[-1] for path in found.paths)
    except UnknownRowsError as error:
        return str(error)
