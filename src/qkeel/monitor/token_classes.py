"""Which tokens count and their classes: query masks, norms of hidden states, token classes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.errors import InvalidTypeError, InvalidValueError, caution
from qkeel.functional.class_statistics import TokenClasses, check_classes, one_hot
from qkeel.patching.forward import unwrapped
from qkeel.spec import AttentionCall
from qkeel.spec.call import of_key

# The query rows that count; padded rows are left out of the statistics.

MaskSource = str | Tensor | Callable[..., Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class QueryMaskSource:
    """The source of the mask [b t] of a pass, which is true (or not 0) where a query row counts.

    given: the name of an argument of the model's forward ("attention_mask"), a function of the forward's arguments, or
    the tensor itself. It applies to calls with b sequences of t queries. In all other calls, every query counts, for
    example in the decoder of an encoder–decoder model if the mask is the encoder's. If it applies to no call at all,
    `PassTokens` warns.
    """

    given: MaskSource
    forward: tuple[str, ...] = ()  # the names of the forward's positional arguments

    def __post_init__(self) -> None:
        if not isinstance(self.given, (str, Tensor)) and not callable(self.given):
            raise InvalidTypeError(
                "expected query_mask as the name of a keyword argument, a function of the forward's arguments, or a "
                f"tensor [b t], got {type(self.given).__name__}"
            )
        if isinstance(self.given, Tensor):
            _refuse_negative(_checked(self.given))

    @classmethod
    def on(cls, model: nn.Module, given: MaskSource) -> QueryMaskSource:
        """Returns the given source, checked against the forward of a model.

        Raises: InvalidValueError if the forward does not take an argument with that name.
        """
        return cls(given, positional(model, "query_mask", given))

    def of(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Tensor | None:
        """Returns the mask of a pass with these arguments, or None if the pass has no mask.

        Raises: InvalidValueError if the mask is not a tensor [b t], or has negative floating-point values.
        """
        mask = from_pass(self.given, self.forward, args, kwargs)
        if mask is None:
            return None
        mask = _checked(mask)
        if not isinstance(self.given, Tensor):
            _refuse_negative(mask)
        return mask if mask.dtype == torch.bool else mask != 0


def positional(model: nn.Module, what: str, given: object) -> tuple[str, ...]:
    """The names of the positional arguments of a model's forward.

    Raises: InvalidValueError if `given`, the value of the option `what`, names an argument that the forward does not
        take.
    """
    parameters = inspect.signature(unwrapped(model).forward).parameters
    kinds = {p.kind for p in parameters.values()}
    if (
        isinstance(given, str)
        and given not in parameters
        and inspect.Parameter.VAR_KEYWORD not in kinds
    ):
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
    """Returns the value of an option in a pass with these arguments.

    Args:
        given: the name of an argument, a function of the arguments, or the value itself.
        forward: the names of the positional arguments.
        args, kwargs: the arguments of the model's forward.
    """
    if isinstance(given, str):
        return {**dict(zip(forward, args)), **kwargs}.get(given)
    return given if isinstance(given, Tensor) else given(*args, **kwargs)


def _checked(mask: object) -> Tensor:
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidValueError(
            f"expected a query mask of shape [batch queries], got {got}"
        )
    return mask


def _refuse_negative(mask: Tensor) -> None:
    if mask.is_floating_point() and bool((mask < 0).any()):
        raise InvalidValueError(
            "expected a query mask that is true (or not 0) where a query row counts, got floating-point numbers below "
            "0, as in a mask that is added to scores; pass mask >= 0 instead"
        )


def with_query_mask(call: Seen, mask: Tensor | None) -> Seen:
    """Returns the call with this mask [b t] if it has b sequences of t queries, else the unchanged call."""
    x = call.logits if isinstance(call, ScoresCall) else call.q
    if mask is None or tuple(mask.shape) != (x.shape[0], x.shape[2]):
        return call
    return dataclasses.replace(call, query_mask=mask.to(x.device))


# The class of each token in a pass, such as image or text; the statistics are split by class.

Ids = range | int | Sequence[int] | Tensor
ClassSource = Mapping[str, Ids] | str | Tensor | Callable[..., Tensor | None]
_WHAT = (
    "expected classes as a dict of token ids by class name, the name of an argument of the forward, a function of its "
    "arguments, a tensor [b t] of class numbers, or a qkeel.monitor.Classes created from one of these, with names"
)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Classes:
    """The source of the class [b t] of each token in a pass: 0, 1, … in the order of `names`, or -1 for no class.

    Args:
        source: one of the following: a dict of token ids by class, `{"text": range(256), "image": range(256, 512)}`,
            with every id in exactly one class, which is applied to the ids in `input_ids` or else in the forward's
            first integer tensor [b t]; the name of a forward argument that contains classes or is true for class 1; a
            function of the forward's arguments that returns the classes, or None for a pass that should not be split;
            or the tensor itself, [b t] or [t].
        names: the class names; by default the keys of the dict, or else "0", "1", …, one for each class in the first
            pass.
        forward: the names of the forward's positional arguments.

    The classes cover all tokens that attention sees as keys. If there are fewer queries than keys (as in a step with a
    cache), the queries are the last tokens of the sequence.
    """

    source: ClassSource
    names: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()  # the names of the forward's positional arguments

    def __post_init__(self) -> None:
        if isinstance(self.source, Tensor):
            check_classes(_shaped(self.source), len(self.names) or 1 << 31)
        if isinstance(self.source, Mapping):
            object.__setattr__(self, "names", tuple(self.source))
        elif not isinstance(self.source, (str, Tensor)) and not callable(self.source):
            raise InvalidTypeError(f"{_WHAT}; got {type(self.source).__name__}")
        names = tuple(self.names)
        object.__setattr__(self, "names", names)
        if (names or isinstance(self.source, Mapping)) and (
            len(names) < 2 or len(set(names)) < len(names)
        ):
            raise InvalidValueError(
                f"expected the names of at least two classes, without repetition, got {names}"
            )
        for name in names:
            if (
                not isinstance(name, str)
                or not name.strip()
                or any(c in name for c in "/\t\n>")
            ):
                raise InvalidValueError(
                    f"expected a class name of letters, without / or >, got {name!r}"
                )
        if isinstance(self.source, Mapping):
            _lookup(self.source)

    @classmethod
    def on(cls, model: nn.Module, source: ClassSource | Classes) -> Classes:
        """Returns the source, checked against the forward of a model.

        Raises: InvalidTypeError or InvalidValueError for an invalid source; InvalidValueError if the forward does not
            have such an argument.
        """
        own = source if isinstance(source, Classes) else cls(source)
        return cls(own.source, own.names, positional(model, "classes", own.source))

    def of(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        counted: Tensor | None = None,
    ) -> Tensor | None:
        """Returns the classes [b t] of a pass with these arguments, or None if the pass has no classes.

        counted: the query rows that count; other rows may contain ids without a class.

        Raises: InvalidTypeError, InvalidValueError or ShapeError if the classes have an unexpected form, or if an id
            does not belong to a class.
        """
        if isinstance(self.source, Mapping):
            named = {**dict(zip(self.forward, args)), **kwargs}
            return _classes_of(
                _lookup(self.source),
                _ids([*named.values(), *args], named.get("input_ids")),
                counted,
            )
        found = from_pass(self.source, self.forward, args, kwargs)
        if found is None:
            return None
        found = _shaped(found)
        found = found.long() if found.dtype == torch.bool else found
        check_classes(found, len(self.names) or 1 << 31)
        return found


def _shaped(classes: object) -> Tensor:
    if not isinstance(classes, Tensor) or classes.ndim not in (1, 2):
        got = (
            tuple(classes.shape)
            if isinstance(classes, Tensor)
            else type(classes).__name__
        )
        raise InvalidValueError(
            f"expected the classes of tokens as a tensor of shape [batch tokens], got {got}"
        )
    return classes if classes.ndim == 2 else classes[None]


def _lookup(source: Mapping[str, Ids]) -> Tensor:
    """The class of each id up to the largest id, or -1 for ids without a class."""
    tensors = []
    for name, ids in source.items():
        tensors.append(_numbers(ids))
        if not tensors[-1].numel() or int(tensors[-1].min()) < 0:
            raise InvalidValueError(
                f"expected the token ids of class {name!r} as a range, a non-negative number or a list of such "
                f"numbers, got {ids!r}"
            )
    table = torch.full((int(torch.cat(tensors).max()) + 1,), -1)
    for number, (name, ids) in enumerate(zip(source, tensors)):
        taken = ids[table[ids] >= 0]
        if len(taken):
            other = list(source)[int(table[taken[0]])]
            raise InvalidValueError(
                f"expected each token id in only one class, got {int(taken[0])} in both {other!r} and {name!r}"
            )
        table[ids] = number
    return table


def _numbers(ids: object) -> Tensor:
    """Converts token ids to a vector, which is empty if the argument is not a set of token ids."""
    if isinstance(ids, Tensor):
        return (
            ids.flatten().cpu()
            if not (ids.is_floating_point() or ids.dtype == torch.bool)
            else torch.zeros(0)
        )
    listed = (
        [ids]
        if isinstance(ids, int)
        else list(ids)
        if isinstance(ids, Sequence)
        else []
    )
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in listed)
    return torch.tensor(listed if whole else [], dtype=torch.int64)


def _ids(values: Sequence[object], named: object) -> Tensor:
    for value in (named, *values):
        if (
            isinstance(value, Tensor)
            and value.ndim == 2
            and value.dtype in (torch.int64, torch.int32)
        ):
            return value
    raise InvalidValueError(
        "expected an integer tensor [b t] of token ids among the forward's arguments, got none; pass classes as the "
        "name of an argument that holds them, or as a function of the arguments"
    )


def _classes_of(table: Tensor, ids: Tensor, counted: Tensor | None) -> Tensor:
    table = table.to(ids.device)
    inside = (ids >= 0) & (ids < len(table))
    found = torch.where(inside, table[ids.clamp(0, len(table) - 1).long()], -1)
    strays = found < 0
    if counted is not None and counted.shape == strays.shape:
        strays = strays & counted.to(strays.device)
    if bool(strays.any()):
        some = ", ".join(map(str, ids[strays].unique()[:5].tolist()))
        raise InvalidValueError(
            f"expected every token id to be in a class, got {int(strays.sum())} tokens in none (ids {some}): "
            "add "
            'them to one, such as "padding": [0], or mark the rows that count with query_mask='
        )
    return found


@final
class PassTokens:
    """The rows that count in the current pass, and their classes."""

    def __init__(
        self, query_mask: QueryMaskSource | None, classes: Classes | None
    ) -> None:
        self._query_mask, self._classes = query_mask, classes
        self._names: tuple[str, ...] = () if classes is None else classes.names
        self._mask: Tensor | None = None
        self._now: Tensor | None = None
        self._said: set[object] = set()
        self._misfit = self._mask_misfit = ""
        self._fitted = self._mask_fitted = False

    def begin(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begins a pass with these arguments."""
        self._mask = (
            None if self._query_mask is None else self._query_mask.of(args, kwargs)
        )
        if self._classes is None:
            return
        self._now = self._classes.of(args, kwargs, self._mask)
        if self._now is None:
            self._now = None if not self._names else torch.full((1, 1), -1)
            return
        if not self._names:
            most = max(int(self._now.max()) + 1 if self._now.numel() else 0, 2)
            self._names = tuple(map(str, range(most)))
        check_classes(self._now, len(self._names))

    @property
    def all_count(self) -> bool:
        """True if the current pass is neither masked nor split by class."""
        return self._mask is None and self._now is None

    def on(self, call: Seen) -> Seen:
        """Returns the call with what is known about its tokens, if it covers the tokens of this pass."""
        if self._mask is not None:
            call = self._masked(call, self._mask)
        if self._now is None:
            return call
        b, t = call.query_shape
        s = call.logits.shape[3] if isinstance(call, ScoresCall) else call.k.shape[2]
        now = self._now
        if isinstance(call, AttentionCall) and of_key(call) is not None:
            now = now.reshape(1, -1)[
                :, : s if s == t else 0
            ]  # only if there are as many queries as keys
        if now.shape == (1, 1) and int(now) < 0:
            now = now.expand(1, s)
        if now.shape[0] not in (1, b) or now.shape[1] != s or t > s:
            self._misfit = (
                f"no attention is split by class: expected classes of shape [batch tokens] = [{b} {s}], one for each "
                f"key of an attention call with {t} queries, got {list(self._now.shape)}. With a cache, give a "
                "function that returns the classes of the whole sequence"
            )
            return call
        self._fitted = True
        now = now.to(call.query_device)
        return dataclasses.replace(
            call,
            classes=TokenClasses(names=self._names, query=now[:, s - t :], key=now),
        )

    def _masked(self, call: Seen, mask: Tensor) -> Seen:
        found = with_query_mask(call, mask)
        if found is not call:
            self._mask_fitted = True
        elif (
            isinstance(call, ScoresCall) or of_key(call) is None
        ):  # packed sequences have no rows of padding
            b, t = call.query_shape
            self._mask_misfit = (
                f"query_mask applies to no attention, so every query row counts: expected a mask of shape [batch "
                f"queries] = [{b} {t}], got {list(mask.shape)}. Give a function of the forward's arguments that "
                "returns a mask with one value for each query"
            )
        return found

    def end(self) -> None:
        """Ends the pass."""
        if not self._mask_fitted:
            self._warn("mask misfit", self._mask_misfit)
        if not self._fitted:  # attention over tokens other than the sequence's, such as an image encoder's, is ignored
            self._warn("misfit", self._misfit)
        elif self._now is not None:
            counts = one_hot(self._now, len(self._names)).sum((0, 1)).tolist()
            for name, count in zip(self._names, counts):
                text = f"no token of the class {name!r} in this pass: its numbers are missing until one appears"
                self._warn(name, "" if count else text)

    def _warn(self, about: object, message: str) -> None:
        """Warns once about each subject."""
        if message and about not in self._said:
            self._said.add(about)
            caution(message)
