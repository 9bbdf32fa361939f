"""A model is searched for attention once: one that equals it in every bit has the same sites, bound to its own modules.

Whether two searches show the same depends on the model and its example. So both are written out whole, tensors bit by
bit, and what was found is taken where that is equal. Whatever can't be written out or is changed from outside (hooks,
exchanged forwards, modes of torch) is searched anew. Tests of the search itself do without this.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from qkeel.heads.site import Sites
from qkeel.sites import find
from qkeel.sites.named_models import bound

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FOUND: dict[bytes, Sites] = {}


@pytest.fixture(autouse=True)
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be imported by the conftest of a folder whose tests want sites, however they are found."""
    search = find._searched

    def known(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sites:
        key = _written_out(model, args, kwargs)
        if key is None:
            return search(model, args, kwargs)
        if key in _FOUND:
            return bound(_FOUND[key], model)
        found = search(model, args, kwargs)
        _FOUND[key] = Sites([dataclasses.replace(site, module=nn.Module()) for site in found], found.missed)
        return found

    monkeypatch.setattr(find, "_searched", known)


def _written_out(model: nn.Module, *example: object) -> bytes | None:
    """All that a search depends on, in short; None where that can't be known."""
    if any(map(_is_changed, model.modules())):
        return None
    if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack() or torch.is_autocast_enabled("cpu"):
        return None
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
    written = io.BytesIO()
    try:
        _Written(written).dump((model, example, state, torch.get_default_dtype(), os.environ.get("QKEEL_NATIVE")))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(written.getbuffer()).digest()


def _is_changed(module: nn.Module) -> bool:
    own = vars(module)
    return (
        any(own.get(name) for name in _HOOKS)
        or any(callable(value) and hasattr(type(module), name) for name, value in own.items())
        or type(module).__module__.startswith(("qkeel.patching", "torch._dynamo", "torch.nn.utils"))
    )


class _Written(pickle.Pickler):
    """Writes tensors bit by bit, and not as what they may turn into when they are copied."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or not value.is_cpu:
            raise pickle.PicklingError("its numbers are elsewhere")
        bits = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        form = (type(value).__name__, str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad)
        return tuple, ((*form, value.is_leaf, bits),)
