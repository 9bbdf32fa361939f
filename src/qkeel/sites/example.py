"""A user's example batch, as arguments of the model's forward; the beginning of a few of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from qkeel.errors import InvalidTypeError
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.see.running_modules import mapped, tensors

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


ROWS, TOKENS = (1, 2), 32
# Arguments with a number for each token that cutting the sequence leaves right.
OF_TOKENS = frozenset(
    {"input_ids", "attention_mask", "labels", "position_ids", "token_type_ids", "idx", "tokens", "targets", "x", "y"}
)
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortExample:
    """Arguments with so many `rows`; `cut` says that their sequences are shorter too."""

    args: Args
    kwargs: Kwargs
    rows: int
    cut: bool


def shorter(args: Args, kwargs: Kwargs) -> Iterator[ShortExample]:
    """Shorter examples, the shortest first: one row where that may do, else two, which show heads and batch apart. None
    where it is not clear what a batch is.

    Dimension 0 of every tensor is the batch, of one size or 1. The next dimension of the first tensor that has one is
    the sequence, unless the tensor has that size twice. An index beyond the end is an exception on the CPU, elsewhere
    the end of the process: there whole numbers are of one shape [b t], as those of tokens are, and a sequence is cut
    where they are tokens, targets, masks or positions by name (OF_TOKENS), or the first one or two arguments.
    """
    given = [x for x in tensors((args, dict(kwargs))) if x.ndim]
    if not given or not _is_plain((args, dict(kwargs))) or any(x.is_nested for x in given):
        return
    on_cpu = all(x.is_cpu for x in given)
    whole = {x.shape for x in given if not x.is_floating_point()}
    if not on_cpu and (len(whole) > 1 or any(len(shape) != 2 for shape in whole)):
        return
    batch, rows = _rows(given)
    size = next((x.shape[1] for x in given if x.ndim > 1 and x.shape[1:].count(x.shape[1]) == 1), 0)
    if (on_cpu or _of_tokens(args, kwargs)) and size > 2 * TOKENS:
        yield from (_example(args, kwargs, n, size) for n in rows)
    yield from (_example(args, kwargs, n, None) for n in rows if n < batch)


def first_row(args: Args, kwargs: Kwargs) -> ShortExample:
    """The first sequence of a batch, whole; all of them where it is not clear what a batch is."""
    return _example(args, kwargs, _rows([x for x in tensors((args, dict(kwargs))) if x.ndim])[1][0], None)


def _rows(given: Sequence[Tensor]) -> tuple[int, list[int]]:
    """The size of the batch, and how many of its rows may do."""
    batch = max(map(len, given))
    return batch, [n for n in ROWS if n <= batch and {*map(len, given)} <= {1, batch}] or [batch]


def _example(args: Args, kwargs: Kwargs, rows: int, size: int | None) -> ShortExample:
    def short(x: object) -> object:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        for dim in range(1, x.ndim):
            x = x.narrow(dim, 0, TOKENS) if x.shape[dim] == size else x
        return x[:rows]

    own, named = mapped((tuple(args), dict(kwargs)), short)
    return ShortExample(args=own, kwargs=named, rows=rows, cut=size is not None)


def _of_tokens(args: Args, kwargs: Kwargs) -> bool:
    """True if no whole number given is an index of a token, which a cut would leave beyond the end."""
    whole = {name for name, x in kwargs.items() if isinstance(x, Tensor) and not x.is_floating_point()}
    placed = [x for x in tensors(tuple(args)) if not x.is_floating_point()]
    return whole <= OF_TOKENS and len(placed) <= 2


def _is_plain(value: object) -> bool:
    """True of tensors, numbers and names in tuples, lists and dicts: nothing that may hold the batch in its own way."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return all(map(_is_plain, value.values())) if type(value) is dict else isinstance(value, _PLAIN)
