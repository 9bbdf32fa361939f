"""The query rows that count: padded ones are left out of the statistics."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall
from qkeel.capture.statistics import Seen
from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.patching.forward_passes import unwrapped

Given = str | Tensor | Callable[..., Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class QueryMask:
    """The source of the mask [b t] of a pass, true (or not 0) where a query row counts.

    given: the name of an argument of the model's forward ("attention_mask"), a function of the forward's
    arguments, or the tensor itself. It applies to calls with b sequences of t queries; others count whole, such as
    the decoder of an encoder–decoder under the encoder's mask.
    """

    given: Given
    forward: tuple[str, ...] = ()  # the names of the forward's positional arguments

    def __post_init__(self) -> None:
        if not isinstance(self.given, (str, Tensor)) and not callable(self.given):
            raise InvalidTypeError(
                "expected query_mask as the name of a keyword argument, a function of the forward's arguments, or a "
                f"tensor [b t], got {type(self.given).__name__}"
            )
        if isinstance(self.given, Tensor):
            _checked(self.given)

    @classmethod
    def on(cls, model: nn.Module, given: Given) -> QueryMask:
        """The same, checked against the forward of a model.

        Raises: InvalidValueError if that takes no argument of the name.
        """
        return cls(given, positional(model, "query_mask", given))

    def of(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
        """The mask of a pass with these arguments; None where the pass gives none.

        Raises: InvalidValueError if it is not a tensor [b t].
        """
        mask = from_pass(self.given, self.forward, args, kwargs)
        if mask is None:
            return None
        mask = _checked(mask)
        return mask if mask.dtype == torch.bool else mask != 0


def positional(model: nn.Module, what: str, given: object) -> tuple[str, ...]:
    """The names of the positional arguments of a model's forward.

    Raises: InvalidValueError if `given`, for the option `what`, is a name, and the forward takes no argument of it.
    """
    parameters = inspect.signature(unwrapped(model).forward).parameters
    kinds = {p.kind for p in parameters.values()}
    if isinstance(given, str) and given not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise InvalidValueError(
            f"expected {what} to name an argument of the model's forward ({', '.join(parameters)}), got {given!r}"
        )
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return tuple(name for name, p in parameters.items() if p.kind in kinds)


def from_pass(
    given: str | Tensor | Callable[..., object],
    forward: Sequence[str],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """The value that an option has in a pass with these arguments.

    Args:
        given: the name of one of them, a function of them, or the value itself.
        forward: the names of the positional ones.
        args, kwargs: of the model's forward.
    """
    if isinstance(given, str):
        return {**dict(zip(forward, args)), **kwargs}.get(given)
    return given if isinstance(given, Tensor) else given(*args, **kwargs)


def _checked(mask: object) -> Tensor:
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidValueError(f"expected a query mask of shape [batch queries], got {got}")
    return mask


def with_query_mask(call: Seen, mask: Tensor | None) -> Seen:
    """The call under this mask [b t], if it is one of b sequences of t queries; else the call as it is."""
    x = call.logits if isinstance(call, ScoresCall) else call.q
    if mask is None or tuple(mask.shape) != (x.shape[0], x.shape[2]):
        return call
    return dataclasses.replace(call, query_mask=mask.to(x.device))
