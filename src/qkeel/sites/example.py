"""A user's example batch, as arguments of the model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qkeel.errors import InvalidTypeError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(batch: object, what: str = "example") -> Arguments:
    """Arguments and keyword arguments from a tensor, a tuple or list of arguments, or a mapping of keyword arguments.

    Raises: InvalidTypeError if it is none of them; `what` names it.
    """
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, (Tensor, tuple, list)):
        return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}
    raise InvalidTypeError(
        f"expected the {what} as a tensor, a tuple of the forward's arguments or a dict of its keyword arguments, "
        f"got {type(batch).__name__}"
    )
