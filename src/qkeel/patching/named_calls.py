"""Intercepts calls of F.scaled_dot_product_attention by that name, without a mode.

Nearly all models look the function up in torch.nn.functional each time that they call it, so their calls can be
intercepted by a replacement stored there. A mode would see the calls too, but every torch function around them would
also pass through the mode.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import functional as F

_SDPA = F.scaled_dot_product_attention
_HOLDERS = "qkeel_holders"
_NAMED_CALLS = threading.Lock()
# Called like a FunctionMode, with the function, types, args and kwargs; returns what the function returns.
TakeCall = Callable[[Callable[..., Any], object, tuple[Any, ...], dict[str, Any]], Any]
# Per thread: the functions that receive the calls. The last one comes first.
_TAKERS: contextvars.ContextVar[tuple[TakeCall, ...]] = contextvars.ContextVar("qkeel_takers", default=())


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Replaces F.scaled_dot_product_attention under its name and passes calls to the current thread's takers."""
    takers = () if torch.compiler.is_compiling() else _TAKERS.get()
    if not takers:
        return _SDPA(*args, **kwargs)
    if len(takers) == 1:
        return takers[0](_SDPA, (), args, kwargs)
    before = _TAKERS.set(takers[:-1])
    try:
        return takers[-1](scaled_dot_product_attention, (), args, kwargs)
    finally:
        _TAKERS.reset(before)


vars(scaled_dot_product_attention)[_HOLDERS] = 0
# The functions that a call of F.scaled_dot_product_attention may reach: torch's own, or its replacement.
SDPA_BY_NAME: frozenset[Callable[..., Any]] = frozenset({_SDPA, scaled_dot_product_attention})


def take_named_calls(undo: ExitStack) -> bool:
    """Passes calls of F.scaled_dot_product_attention by that name to their thread's takers until `undo` is closed.

    Does nothing and returns False if some other function has replaced it.
    """
    with _NAMED_CALLS:
        if F.scaled_dot_product_attention not in SDPA_BY_NAME:
            return False
        vars(scaled_dot_product_attention)[_HOLDERS] += 1
        F.scaled_dot_product_attention = scaled_dot_product_attention
    undo.callback(_release_named_calls)
    return True


def _release_named_calls() -> None:
    with _NAMED_CALLS:
        vars(scaled_dot_product_attention)[_HOLDERS] -= 1
        free = not vars(scaled_dot_product_attention)[_HOLDERS]
        if free and F.scaled_dot_product_attention is scaled_dot_product_attention:
            F.scaled_dot_product_attention = _SDPA


def begin_taking(take: TakeCall) -> None:
    """Passes this thread's calls to `take` from now on. Calls that `take` itself makes go to the previous taker."""
    _TAKERS.set((*_TAKERS.get(), take))


def end_taking(take: TakeCall) -> None:
    """Undoes one `begin_taking`, which need not be the most recent one."""
    takers = [*_TAKERS.get()]
    if take in takers:
        del takers[len(takers) - 1 - takers[::-1].index(take)]
        _TAKERS.set(tuple(takers))
