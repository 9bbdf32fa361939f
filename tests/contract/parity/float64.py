"""Runs a stock module in float64 throughout, its float32 islands (norms, softmax, rotary tables) included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Widen(TorchFunctionMode):
    """Whoever asks for float32 gets float64; a float32 result is an error, so no island is overlooked."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        given = {name: _widen(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_widen, args), **given)
        if isinstance(result, Tensor) and result.dtype in (
            torch.float32,
            torch.complex64,
        ):
            raise AssertionError(f"{func} made a {result.dtype} tensor")
        return result


def _widen(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Float64 as default dtype and in place of every float32 that is asked for; undone on leaving."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)
