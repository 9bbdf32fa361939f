"""Calls of F.scaled_dot_product_attention by that name, seen without a mode.

Nearly all models look the function up in torch.nn.functional whenever they call it, so a function that is stored there
sees their calls. A mode would see them too, but with a callback for each torch function around them.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

SDPA = F.scaled_dot_product_attention


class NamedCallReader(Protocol):
    """What observes calls by name."""

    def before_named(self) -> None:
        """Called before a call."""

    def attend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Makes the call in torch's place, with the same bits; None leaves it to torch."""

    def after_named(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        """Called after a call that returned `out`."""


_READERS: contextvars.ContextVar[tuple[NamedCallReader, ...]] = contextvars.ContextVar(
    "qkeel_named", default=()
)
_LOCK = threading.Lock()
_users = [0]


def is_mask_object(mask: object) -> bool:
    """True for the masks of torch.nn.attention.bias, whose own storage holds nothing."""
    objects = sys.modules.get("torch.nn.attention.bias")
    return objects is not None and isinstance(mask, objects.CausalBias)


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Stands for F.scaled_dot_product_attention under its name and tells this thread's readers of its calls."""
    readers = () if torch.compiler.is_compiling() else _READERS.get()
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    is_object = is_mask_object(mask)
    if not readers and not is_object:
        return SDPA(*args, **kwargs)
    token = _READERS.set(
        ()
    )  # the calls that torch makes for a mask object are part of this one
    try:
        for reader in readers:
            reader.before_named()
        if is_object:
            # Such a mask knows the function by what is stored under its name.
            function = F.scaled_dot_product_attention
            out = type(mask).__torch_function__(function, (type(mask),), args, kwargs)  # type: ignore[union-attr]
        else:
            out = None
            for reader in readers:
                out = reader.attend(args, kwargs)
                if out is not None:
                    break
            if out is None:
                out = SDPA(*args, **kwargs)
    finally:
        _READERS.reset(token)
    for reader in readers:
        reader.after_named(args, kwargs, out)
    return out


def read_named_calls(reader: NamedCallReader, undo: ExitStack) -> bool:
    """Tells a reader of this thread's calls by name until `undo` is closed; False if another function than torch's is
    stored under the name."""
    with _LOCK:
        if F.scaled_dot_product_attention not in (SDPA, scaled_dot_product_attention):
            return False
        _users[0] += 1
        F.scaled_dot_product_attention = scaled_dot_product_attention
    undo.callback(_release)
    _READERS.set((*_READERS.get(), reader))
    undo.callback(
        lambda: _READERS.set(
            tuple(other for other in _READERS.get() if other is not reader)
        )
    )
    return True


def _release() -> None:
    with _LOCK:
        _users[0] -= 1
        if (
            not _users[0]
            and F.scaled_dot_product_attention is scaled_dot_product_attention
        ):
            F.scaled_dot_product_attention = SDPA
