"""What runs below torch's functions: inside torch.jit.script, torch.func.vmap and compiled C++ code, op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode

Look = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]

# Ops that are called otherwise in torch's Python functions.
_NAMES = {"unsafe_view": "view", "to_copy": "to"}


class Below(TorchDispatchMode):
    """Hands every op to `look`, after it ran, and changes nothing."""

    supports_higher_order_operators = True

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
            with _recording():
                self._look(bare(func), args, kwargs, out)
        return out


@contextmanager
def _recording() -> Iterator[None]:
    """Lets autograd record as usual, which it does not below torch's functions: it has done its part there."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        yield


def bare(func: Any) -> str:
    """The name of a torch function or op, without underscores around it and without its overload."""
    name = getattr(func, "__name__", "").partition(".")[0].strip("_")
    return _NAMES.get(name, name) if isinstance(func, torch._ops.OpOverload) else name


def in_vmap() -> bool:
    """Whether torch.func.vmap runs here: tensors then lack the dimension that is mapped over."""
    levels = get_interpreter_stack()
    return levels is not None and any(level.key() == TransformType.Vmap for level in levels)
