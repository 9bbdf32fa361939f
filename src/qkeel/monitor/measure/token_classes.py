"""The class of each token of a pass: images and text, say; the statistics are split by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall
from qkeel.capture.statistics import Seen
from qkeel.errors import InvalidTypeError, InvalidValueError, caution
from qkeel.functional.statistics.class_stats import TokenClasses, check_classes, one_hot
from qkeel.monitor.measure.query_mask import QueryMask, from_pass, positional, with_query_mask
from qkeel.spec import AttentionCall
from qkeel.spec.band_call import of_key

Ids = range | int | Sequence[int] | Tensor
GivenClasses = Mapping[str, Ids] | str | Tensor | Callable[..., Tensor | None]
_WHAT = (
    "expected classes as a dict of token ids by class name, the name of an argument of the forward, a function of its "
    "arguments, a tensor [b t] of class numbers, or qkeel.monitor.Classes of one of these with names"
)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Classes:
    """The source of the class [b t] of each token of a pass: 0, 1, … in the order of `names`, -1 for none.

    Args:
        given: token ids by class, `{"text": range(256), "image": range(256, 512)}`, of the forward's `input_ids`, or
            where it has none of its first integer tensor [b t], every id in one class; the name of an argument of the
            forward that holds classes, or is true at class 1; a function of the forward's arguments that gives them,
            or None for a pass that is not to be split; the tensor itself, [b t] or [t].
        names: of the classes; by default those of the dict, else "0", "1", … as many as the first pass has.
        forward: the names of the forward's positional arguments.

    Classes are of the tokens of the sequence that attention sees: those of all its keys. Where there are fewer queries
    than keys (a cached step), queries are the last of them.
    """

    given: GivenClasses
    names: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()  # the names of the forward's positional arguments

    def __post_init__(self) -> None:
        if isinstance(self.given, Tensor):
            check_classes(_shaped(self.given), len(self.names) or 1 << 31)
        if isinstance(self.given, Mapping):
            object.__setattr__(self, "names", tuple(self.given))
        elif not isinstance(self.given, (str, Tensor)) and not callable(self.given):
            raise InvalidTypeError(f"{_WHAT}; got {type(self.given).__name__}")
        names = tuple(self.names)
        object.__setattr__(self, "names", names)
        if (names or isinstance(self.given, Mapping)) and (len(names) < 2 or len(set(names)) < len(names)):
            raise InvalidValueError(f"expected the names of two or more classes, each once, got {names}")
        for name in names:
            if not isinstance(name, str) or not name.strip() or any(c in name for c in "/\t\n>"):
                raise InvalidValueError(f"expected a class name of letters, without / or >, got {name!r}")
        if isinstance(self.given, Mapping):
            _lookup(self.given)

    @classmethod
    def on(cls, model: nn.Module, given: GivenClasses | Classes) -> Classes:
        """The same, checked against the forward of a model.

        Raises: InvalidTypeError, InvalidValueError; the latter if the forward takes no argument of the name too.
        """
        own = given if isinstance(given, Classes) else cls(given)
        return cls(own.given, own.names, positional(model, "classes", own.given))

    def of(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], counted: Tensor | None = None
    ) -> Tensor | None:
        """The classes [b t] of a pass with these arguments; None where the pass gives none.

        counted: query rows that count; others may hold ids of no class.

        Raises: InvalidTypeError, InvalidValueError, ShapeError if it is not that, or an id is of no class.
        """
        if isinstance(self.given, Mapping):
            named = {**dict(zip(self.forward, args)), **kwargs}
            return _classes_of(_lookup(self.given), _ids([*named.values(), *args], named.get("input_ids")), counted)
        found = from_pass(self.given, self.forward, args, kwargs)
        if found is None:
            return None
        found = _shaped(found)
        found = found.long() if found.dtype == torch.bool else found
        check_classes(found, len(self.names) or 1 << 31)
        return found


def _shaped(classes: object) -> Tensor:
    if not isinstance(classes, Tensor) or classes.ndim not in (1, 2):
        got = tuple(classes.shape) if isinstance(classes, Tensor) else type(classes).__name__
        raise InvalidValueError(f"expected the classes of tokens as a tensor of shape [batch tokens], got {got}")
    return classes if classes.ndim == 2 else classes[None]


def _lookup(given: Mapping[str, Ids]) -> Tensor:
    """The class of each id up to the largest; -1 for none."""
    tensors = []
    for name, ids in given.items():
        tensors.append(_numbers(ids))
        if not tensors[-1].numel() or int(tensors[-1].min()) < 0:
            raise InvalidValueError(
                f"expected the token ids of class {name!r} as a range, a number or a list of numbers from 0 on, "
                f"got {ids!r}"
            )
    table = torch.full((int(torch.cat(tensors).max()) + 1,), -1)
    for number, (name, ids) in enumerate(zip(given, tensors)):
        taken = ids[table[ids] >= 0]
        if len(taken):
            other = list(given)[int(table[taken[0]])]
            raise InvalidValueError(
                f"expected each token id in one class, got {int(taken[0])} in both {other!r} and {name!r}"
            )
        table[ids] = number
    return table


def _numbers(ids: object) -> Tensor:
    """Token ids as one vector; empty if they are none."""
    if isinstance(ids, Tensor):
        return ids.flatten().cpu() if not (ids.is_floating_point() or ids.dtype == torch.bool) else torch.zeros(0)
    listed = [ids] if isinstance(ids, int) else list(ids) if isinstance(ids, Sequence) else []
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in listed)
    return torch.tensor(listed if whole else [], dtype=torch.int64)


def _ids(values: Sequence[object], named: object) -> Tensor:
    for value in (named, *values):
        if isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
            return value
    raise InvalidValueError(
        "expected token ids among the forward's arguments, an integer tensor [b t], to read classes from; found none: "
        "give classes as the name of an argument that holds them or as a function of the arguments"
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
            f"expected every token id in a class, got {int(strays.sum())} tokens that are in none (ids {some}): add "
            'them to one, such as "padding": [0], or say by query_mask= which rows count'
        )
    return found


@final
class PassTokens:
    """The rows that count in the running pass, and the class of each."""

    def __init__(self, query_mask: QueryMask | None, classes: Classes | None) -> None:
        self._query_mask, self._classes = query_mask, classes
        self._names: tuple[str, ...] = () if classes is None else classes.names
        self._mask: Tensor | None = None
        self._now: Tensor | None = None
        self._said: set[object] = set()
        self._misfit = ""
        self._fitted = False

    def begin(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """A pass with these arguments begins."""
        self._mask = None if self._query_mask is None else self._query_mask.of(args, kwargs)
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
        """True if nothing is left out of the running pass, nor split."""
        return self._mask is None and self._now is None

    def on(self, call: Seen) -> Seen:
        """The call with what is known of its tokens, where it is one of them."""
        call = with_query_mask(call, self._mask)
        if self._now is None:
            return call
        b, t = call.query_shape
        s = call.logits.shape[3] if isinstance(call, ScoresCall) else call.k.shape[2]
        now = self._now
        if isinstance(call, AttentionCall) and of_key(call) is not None:
            now = now.reshape(1, -1)[:, : s if s == t else 0]  # of as many queries as keys
        if now.shape == (1, 1) and int(now) < 0:
            now = now.expand(1, s)
        if now.shape[0] not in (1, b) or now.shape[1] != s or t > s:
            self._misfit = (
                f"no attention is split by class: expected the classes of [batch tokens] = [{b} {s}], those of the "
                f"keys of an attention of {t} queries, got {list(self._now.shape)}. With a cache, give a function "
                "that gives the classes of the whole sequence"
            )
            return call
        self._fitted = True
        now = now.to(call.query_device)
        return dataclasses.replace(call, classes=TokenClasses(names=self._names, query=now[:, s - t :], key=now))

    def end(self) -> None:
        """The pass is over."""
        if not self._fitted:  # others than those of the sequence are no concern: an image encoder's, say
            self._warn("misfit", self._misfit)
        elif self._now is not None:
            counts = one_hot(self._now, len(self._names)).sum((0, 1)).tolist()
            for name, count in zip(self._names, counts):
                text = f"no token of the class {name!r} in this pass: its numbers are missing until one comes"
                self._warn(name, "" if count else text)

    def _warn(self, about: object, message: str) -> None:
        """Once."""
        if message and about not in self._said:
            self._said.add(about)
            caution(message)
