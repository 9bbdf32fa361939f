"""Which tokens of a pass count, and their classes, such as image or text, by which the statistics are split."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import Seen
from qkeel.errors import InvalidTypeError, InvalidValueError, caution
from qkeel.functional.class_statistics import TokenClasses, check_classes, one_hot
from qkeel.patching.forward import unwrapped
from qkeel.spec import AttentionCall
from qkeel.spec.call import of_key, with_query_mask

MaskSource = str | Tensor | Callable[..., Tensor]
Ids = range | int | Sequence[int] | Tensor
TensorPair = tuple[Tensor, Tensor]
ClassSource = (
    Mapping[str, Ids]
    | str
    | Tensor
    | TensorPair
    | Callable[..., Tensor | TensorPair | None]
)
_WHAT = (
    "expected classes as a dict of token ids by class name, the name of an argument of the forward, a function of its "
    "arguments, a tensor [b t] of class numbers, or a qkeel.monitor.Classes created from one of these, with names"
)
_ID_TYPES = (torch.int64, torch.int32)
# Where their number is not known.
_MOST_CLASSES = 1 << 31


def positional(model: nn.Module, option: str, source: object) -> tuple[str, ...]:
    """The names of the positional arguments of a model's forward.

    Raises: InvalidValueError if `source`, the value of the option, names an argument that the forward does not take.
    """
    parameters = inspect.signature(unwrapped(model).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(source, str) and source not in parameters and not takes_any:
        raise InvalidValueError(
            f"expected {option} to name an argument of the model's forward ({', '.join(parameters)}), got {source!r}"
        )
    return tuple(
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


def from_pass(
    source: object,
    forward: Sequence[str],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """Returns the value of an option in a pass with these arguments: an argument by its name, a function of the
    arguments, or the value itself."""
    if isinstance(source, str):
        return {**dict(zip(forward, args)), **kwargs}.get(source)
    return source(*args, **kwargs) if callable(source) else source


def _shape_or_type(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def query_mask_of(
    source: MaskSource,
    forward: Sequence[str],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Tensor | None:
    """Returns the mask [b t] of a pass with these arguments, which is true where a query row counts, or None if the pass
    has no mask; padded rows are left out of the statistics.

    source: the name of an argument of the model's forward ("attention_mask"), a function of the forward's arguments, or
    the tensor itself, true or not 0 where a row counts. It applies to calls with b sequences of t queries. In all other
    calls, every query counts, for example in the decoder of an encoder–decoder model if the mask is the encoder's. If
    it applies to no call at all, `PassTokens` warns. forward: the names of the forward's positional arguments.

    Raises: InvalidValueError if the mask is not a tensor [b t], or has negative floating-point values.
    """
    mask = from_pass(source, forward, args, kwargs)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise InvalidValueError(
            f"expected a query mask of shape [batch queries], got {_shape_or_type(mask)}"
        )
    if mask.is_floating_point() and bool((mask < 0).any()):
        raise InvalidValueError(
            "expected a query mask that is true (or not 0) where a query row counts, got floating-point numbers "
            "below 0, as in a mask that is added to scores; pass mask >= 0 instead"
        )
    return mask if mask.dtype == torch.bool else mask != 0


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Classes:
    """The source of the class [b t] of each token in a pass: 0, 1, … in the order of `names`, or -1 for no class.

    Args:
        source: one of the following: a dict of token ids by class, `{"text": range(256), "image": range(256, 512)}`,
            with every id in exactly one class, which is applied to the ids in `input_ids` or else in the forward's
            first integer tensor [b t]; the name of a forward argument that contains classes or is true for class 1; a
            function of the forward's arguments that returns the classes, or None for a pass that should not be split;
            or the tensor itself, [b t] or [t]. Where queries attend to other tokens than their own (cross-attention), a
            pair of tensors, or a function that returns one: the classes of the queries and those of the keys.
        names: the class names; by default the keys of the dict, or else "0", "1", …, one for each class in the first
            pass.

    The classes cover all tokens that attention sees as keys. If there are fewer queries than keys (as in a step with a
    cache), the queries are the last tokens of the sequence.
    """

    source: ClassSource
    names: tuple[str, ...] = ()
    _class_of_id: Tensor | None = dataclasses.field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        source, names = self.source, tuple(self.names)
        if isinstance(source, Mapping):
            names = tuple(source)
        elif not isinstance(source, (str, Tensor, tuple)) and not callable(source):
            raise InvalidTypeError(f"{_WHAT}; got {type(source).__name__}")
        object.__setattr__(self, "names", names)
        if isinstance(source, (Tensor, tuple)):
            self.of((), (), {})
        if (names or isinstance(source, Mapping)) and len(set(names)) < max(
            len(names), 2
        ):
            raise InvalidValueError(
                f"expected the names of at least two classes, without repetition, got {names}"
            )
        for name in names:
            # Names become parts of keys of trackers, such as text->image.
            if not isinstance(name, str) or not name.strip() or set("/\t\n>") & {*name}:
                raise InvalidValueError(
                    f"expected a class name of letters, without / or >, got {name!r}"
                )
        if isinstance(source, Mapping):
            object.__setattr__(self, "_class_of_id", _class_of_id(source))

    def of(
        self,
        forward: Sequence[str],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        counted: Tensor | None = None,
    ) -> TensorPair | None:
        """Returns the classes of the queries and of the keys [b t] in a pass with these arguments, or None if the pass
        has no classes. Of tokens that attend to themselves it is the same tensor twice.

        forward: the names of the forward's positional arguments. counted: the query rows that count; other rows may
        contain ids without a class.

        Raises: InvalidTypeError, InvalidValueError or ShapeError if the classes have an unexpected form, or if an id
            does not belong to a class.
        """
        if self._class_of_id is not None:
            named = {**dict(zip(forward, args)), **kwargs}
            ids = _token_ids([named.get("input_ids"), *named.values(), *args])
            classes = _classes_of(self._class_of_id, ids, counted)
            return classes, classes
        classes = from_pass(self.source, forward, args, kwargs)
        if classes is None:
            return None
        if isinstance(classes, tuple) and len(classes) == 2:
            queries, keys = map(self._checked, classes)
            return queries, keys
        classes = self._checked(classes)
        return classes, classes

    def _checked(self, classes: object) -> Tensor:
        if not isinstance(classes, Tensor) or classes.ndim not in (1, 2):
            raise InvalidValueError(
                "expected the classes of tokens as a tensor of shape [batch tokens], got "
                f"{_shape_or_type(classes)}"
            )
        classes = classes if classes.ndim == 2 else classes[None]
        classes = classes.long() if classes.dtype == torch.bool else classes
        check_classes(classes, len(self.names) or _MOST_CLASSES)
        return classes


def _class_of_id(source: Mapping[str, Ids]) -> Tensor:
    """The class of each id up to the largest id, or -1 for ids without a class."""
    ids_of_class = []
    for name, ids in source.items():
        try:
            numbers = torch.as_tensor([*ids] if isinstance(ids, range) else ids)
        except (TypeError, ValueError, RuntimeError):
            # The check below refuses it.
            numbers = torch.empty(0)
        if (
            numbers.dtype not in _ID_TYPES
            or not numbers.numel()
            or int(numbers.min()) < 0
        ):
            raise InvalidValueError(
                f"expected the token ids of class {name!r} as a range, a non-negative number or a list of such "
                f"numbers, got {ids!r}"
            )
        ids_of_class.append(numbers.flatten().cpu().long())
    table = torch.full((int(torch.cat(ids_of_class).max()) + 1,), -1)
    for number, (name, numbers) in enumerate(zip(source, ids_of_class)):
        taken = numbers[table[numbers] >= 0]
        if len(taken):
            first_class = list(source)[int(table[taken[0]])]
            raise InvalidValueError(
                f"expected each token id in only one class, got {int(taken[0])} in both {first_class!r} and {name!r}"
            )
        table[numbers] = number
    return table


def _token_ids(values: Sequence[object]) -> Tensor:
    """The first integer tensor [b t]."""
    for value in values:
        is_integer = isinstance(value, Tensor) and value.dtype in _ID_TYPES
        if is_integer and value.ndim == 2:  # type: ignore[attr-defined]
            return value  # type: ignore[return-value]
    raise InvalidValueError(
        "expected an integer tensor [b t] of token ids among the forward's arguments, got none; pass classes as the "
        "name of an argument that holds them, or as a function of the arguments"
    )


def _classes_of(table: Tensor, ids: Tensor, counted: Tensor | None) -> Tensor:
    table = table.to(ids.device)
    inside = (ids >= 0) & (ids < len(table))
    classes = torch.where(inside, table[ids.clamp(0, len(table) - 1).long()], -1)
    strays = classes < 0
    if counted is not None and counted.shape == strays.shape:
        strays = strays & counted.to(strays.device)
    if bool(strays.any()):
        examples = ", ".join(map(str, ids[strays].unique()[:5].tolist()))
        raise InvalidValueError(
            f"expected every token id to be in a class, got {int(strays.sum())} tokens in none (ids {examples}): add "
            'them to one, such as "padding": [0], or mark the rows that count with query_mask='
        )
    return classes


def _rows_differ(call: Seen) -> bool:
    """Whether queries see different keys, as in a step with a cache and hardly ever in cross-attention."""
    if call.causal or call.window is not None:
        return True
    mask = call.mask
    if mask is None or mask.shape[2] == 1:
        return False
    return not torch.equal(mask, mask[:, :, :1].expand_as(mask))


@final
class PassTokens:
    """The rows that count in the current pass, and their classes.

    Attributes:
        all_count: True if the current pass is neither masked nor split by class.
    """

    def __init__(
        self,
        model: nn.Module,
        query_mask: MaskSource | None,
        classes: ClassSource | Classes | None,
    ) -> None:
        """Takes a model and the sources of its masks and classes.

        Raises: InvalidTypeError or InvalidValueError for an invalid source, or one that names an argument that the
            forward does not have.
        """
        is_source = isinstance(query_mask, (str, Tensor)) or callable(query_mask)
        if query_mask is not None and not is_source:
            raise InvalidTypeError(
                "expected query_mask as the name of a keyword argument, a function of the forward's arguments, or a "
                f"tensor [b t], got {type(query_mask).__name__}"
            )
        self._query_mask, self._classes = query_mask, None
        self._forward = positional(model, "query_mask", query_mask)
        if isinstance(query_mask, Tensor):
            query_mask_of(query_mask, (), (), {})
        self._names: tuple[str, ...] = ()
        if classes is not None:
            classes = classes if isinstance(classes, Classes) else Classes(classes)
            positional(model, "classes", classes.source)
            self._classes, self._names = classes, classes.names
        self._mask: Tensor | None = None
        # Of queries and keys; the same object twice where tokens attend to themselves.
        self._class_of_token: TensorPair | None = None
        # Why the mask or the classes fit no call so far; None once they have fitted one.
        self._misfits: dict[str, str | None] = {"mask": "", "classes": ""}
        self._warned: set[str] = set()
        self.all_count = True

    def begin(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begins a pass with these arguments."""
        if self._query_mask is not None:
            self._mask = query_mask_of(self._query_mask, self._forward, args, kwargs)
        self.all_count = self._mask is None
        if self._classes is None:
            return
        classes = self._classes.of(self._forward, args, kwargs, self._mask)
        if classes is None and self._names:
            # Every step has the same numbers, so a pass without classes has tokens of no class.
            of_none = torch.full((1, 1), -1)
            classes = of_none, of_none
        elif classes is not None:
            if not self._names:
                n_classes = max([int(x.max()) + 1 for x in classes if x.numel()] or [0])
                self._names = tuple(map(str, range(max(n_classes, 2))))
            for x in classes:
                check_classes(x, len(self._names))
        self._class_of_token = classes
        self.all_count = self._mask is None and classes is None

    def on(self, call: Seen) -> Seen:
        """Returns the call with what is known about its tokens, if it covers the tokens of this pass."""
        b, t = call.query_shape
        is_packed = isinstance(call, AttentionCall) and of_key(call) is not None
        if self._mask is not None:
            masked = with_query_mask(call, self._mask)
            if masked is not call:
                self._misfits["mask"], call = None, masked
            # Packed sequences have no rows of padding.
            elif not is_packed:
                self._misfit(
                    "mask",
                    "query_mask applies to no attention, so every query row counts: expected a mask of shape [batch "
                    f"queries] = [{b} {t}], got {list(self._mask.shape)}. Give a function of the forward's arguments "
                    "that returns a mask with one value for each query",
                )
        if self._class_of_token is None:
            return call
        s = call.scores_shape[3]
        queries, classes = self._class_of_token
        are_pair = queries is not classes
        if is_packed:
            # The sequences lie one after the other, as many queries as keys.
            classes = classes.reshape(1, -1)[:, : s if s == t else 0]
        if classes.shape == (1, 1) and int(classes) < 0:
            classes = classes.expand(1, s)
        if not are_pair and (t == 1 or t == s or (t < s and _rows_differ(call))):
            # With a cache, the queries are the last tokens.
            queries = classes[:, -t:]
        fits = [x.shape[0] in (1, b) for x in (queries, classes)]
        if not all(fits) or queries.shape[1] != t or classes.shape[1] != s:
            given = [list(x.shape) for x in self._class_of_token[not are_pair :]]
            self._misfit(
                "classes",
                f"no attention is split by class: expected classes of shape [batch tokens] = [{b} {s}], one for each key, and "
                f"those of the {t} queries where these are other tokens (cross-attention), got "
                f"{' and '.join(map(str, given))}. With a cache, give a function that returns the classes of the whole "
                "sequence; with cross-attention, a pair: if all queries are of class 0, "
                f"classes=qkeel.monitor.Classes((torch.zeros({b}, {t}, dtype=torch.long), classes_of_keys), "
                f"names={self._names}), or a function that returns such a pair",
            )
            return call
        self._misfits["classes"] = None
        queries, classes = (x.to(call.query_device) for x in (queries, classes))
        split = TokenClasses(names=self._names, query=queries, key=classes)
        return dataclasses.replace(call, classes=split)

    def _misfit(self, subject: str, text: str) -> None:
        if self._misfits[subject] is not None:
            self._misfits[subject] = text

    def end(self) -> None:
        """Ends the pass. Attention over other tokens than the sequence's, such as an image encoder's, is ignored."""
        for subject, text in self._misfits.items():
            self._warn(subject, text or "")
        if self._misfits["classes"] is None and self._class_of_token is not None:
            members = [one_hot(x, len(self._names)) for x in self._class_of_token]
            counts = sum([x.sum((0, 1)) for x in members])
            assert isinstance(counts, Tensor)
            for name, count in zip(self._names, counts.tolist()):
                missing = f"no token of the class {name!r} in this pass: its numbers are missing until one appears"
                self._warn(f"class {name}", "" if count else missing)

    def _warn(self, subject: str, text: str) -> None:
        """Warns once about each subject."""
        if text and subject not in self._warned:
            self._warned.add(subject)
            caution(text)
