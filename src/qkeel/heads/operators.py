"""The operators of a recorded pass: what each of them read and wrote, and how to run some of them again with other
numbers.

A pass is recorded as it runs, operator by operator, and nothing is looked at then. What an operator read and wrote is
worked out when somebody asks, and an index by memory leads from a tensor to the operators that touch it. So whoever
follows one attention's weights looks at the operators of that attention, however deep the model is.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from qkeel.capture.modules import mapped, tensors
from qkeel.errors import RefusedError
from qkeel.patching.modes import Args, Function, Kwargs, Operator, function_name
from qkeel.patching.parallel_training import without_others
from qkeel.patching.private_operators import written_arguments

_LOG = logging.getLogger(__name__)

# Where a tensor lies: its memory, offset, sizes, strides and number format. Two tensors at one place are the same.
Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
Values = Mapping[Place, Tensor]
Contents = Mapping[int, torch.UntypedStorage]
Lookup = Callable[[Tensor], Tensor]

# Their output depends on the form of what they are given, not on its numbers.
_FORM_ALONE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "convolution")


def place(x: Tensor) -> Place:
    """The place of a tensor; of one without memory of its own (a subclass), that of the object."""
    try:
        return memory(x), int(x.storage_offset()), x.shape, x.stride(), x.dtype
    except (RuntimeError, NotImplementedError):
        return id(x), 0, x.shape, (), x.dtype


def memory(x: Tensor) -> int:
    """The address of the memory in which a tensor lies, views of one tensor in the same."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(x)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)  # not frozen: there are a hundred of a layer
class Operation:
    """One operator that ran: what it was given, what came out, and the memory whose numbers it read and wrote.

    `changed` are the arguments that it wrote into.
    """

    function: Function
    args: Args
    kwargs: Kwargs
    out: object
    changed: tuple[Tensor, ...]
    reads: frozenset[int]
    writes: frozenset[int]

    @property
    def makes(self) -> frozenset[int]:
        """The memory of what came out that is neither a view nor something that was written into."""
        return self.writes.difference(self.reads, map(memory, self.changed))


@final
class Record:
    """The operators of a pass, which hold every tensor of it, with an index of who reads and writes which memory."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._memory: dict[int, int] = {}  # of a tensor, by its id: all of them are alive
        self.operations = [self._operation(*operator) for operator in operators]
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._writers: dict[int, list[int]] = defaultdict(list)
        for i, operation in enumerate(self.operations):
            for m in operation.reads:
                self._readers[m].append(i)
            for m in operation.writes:
                self._writers[m].append(i)

    def _operation(self, function: Function, args: Args, kwargs: Kwargs, out: object) -> Operation:
        changed = tuple(tensors(written_arguments(function, args, kwargs)))
        name = function_name(function)
        form_alone = name in _FORM_ALONE or name.startswith("new_")
        return Operation(
            function=function,
            args=args,
            kwargs=kwargs,
            out=out,
            changed=changed,
            reads=frozenset() if form_alone else frozenset(self._memories((args, kwargs) if kwargs else args)),
            writes=frozenset(self._memories((out, changed) if changed else (out,))),
        )

    def _memories(self, value: object) -> Iterator[int]:
        for x in tensors(value):
            found = self._memory.get(id(x))
            if found is None:
                found = self._memory[id(x)] = memory(x)
            yield found

    def reached(self, start: Iterable[int], since: int = 0, until: int | None = None) -> set[int]:
        """The memory whose numbers depend on that which is given, by the operators from number `since` on."""
        return self._spread(start, since, until, lambda _operation, _found: True)

    def weights_of(self, start: Iterable[int], known: set[int], dynamic: set[int]) -> set[int]:
        """The memory of weights made of those that are given, as by a transpose or a parametrization: not what they
        are multiplied with, be that computed from the input (`dynamic`) or itself learned."""

        def is_weight(operation: Operation, found: set[int]) -> bool:
            product = function_name(operation.function) in _PRODUCTS
            return dynamic.isdisjoint(operation.reads) and not (product and not operation.reads <= found | known)

        return self._spread(start, 0, None, is_weight)

    def _spread(
        self, start: Iterable[int], since: int, until: int | None, passes: Callable[[Operation, set[int]], bool]
    ) -> set[int]:
        """The memory that is given, and what the operators write that read some of it and pass it on, in order."""
        until = len(self.operations) if until is None else until
        found = set(start)
        waiting: list[int] = []
        queued: set[int] = set()

        def follow(more: Iterable[int], first: int) -> None:
            for m in more:
                for i in self._readers.get(m, ()):
                    if first <= i < until and i not in queued:
                        queued.add(i)
                        heapq.heappush(waiting, i)

        follow(found, since)
        while waiting:
            i = heapq.heappop(waiting)
            if passes(self.operations[i], found):
                new = self.operations[i].writes - found
                found |= new
                follow(new, i + 1)
        return found

    def behind(
        self,
        wanted: Iterable[int],
        until: int,
        unread: Callable[[Operation], Iterable[int]] = lambda _: (),
        given: Mapping[int, int] | None = None,
        since: int = 0,
    ) -> list[Operation]:
        """The operators that the numbers in this memory come from, in their order.

        Args:
            wanted: the memory.
            until: how many operators had run when it was read.
            unread: what of an operator's input is not followed further.
            given: memory whose numbers are there from the operator of this number on: what made them is left out.
            since: the number of the first operator that is looked at.
        """
        given = given or {}
        waiting: list[int] = []
        queued: set[int] = set()
        kept: list[Operation] = []

        def follow(more: Iterable[int], before: int) -> None:
            for m in more:
                first = max(since, given.get(m, 0))
                for i in self._writers.get(m, ()):
                    if first <= i < before and i not in queued:
                        queued.add(i)
                        heapq.heappush(waiting, -i)

        follow(wanted, until)
        while waiting:
            i = -heapq.heappop(waiting)
            operation = self.operations[i]
            kept.append(operation)
            follow(operation.reads.difference(unread(operation)), i)
        return kept[::-1]

    def readers(self, wanted: Iterable[int], until: int) -> list[int]:
        """The numbers of the operators before this one that read any of this memory."""
        return sorted({i for m in wanted for i in self._readers.get(m, ()) if i < until})

    def maker(self, wanted: int, until: int) -> int:
        """The number of operators that had run when the tensor in this memory was there first."""
        numbers = (i for i in reversed(self._writers.get(wanted, [])) if i < until)
        return next((i for i in numbers if wanted in self.operations[i].makes), -1) + 1


class Repetition:
    """Operators that can be run again with other numbers in some places; those that would do the same are left out."""

    def __init__(self, operations: Sequence[Operation], changed: set[int]) -> None:
        """Takes the operators in their order, and the memory whose numbers will be others."""
        self.operations = _affected(operations, changed)

    @functools.cached_property
    def _steps(self) -> list[tuple[Function, Any, list[Place]]]:
        """What is called, with marks in the place of tensors, and the places of what comes out."""
        # Another process may repeat other operators, or none: waiting for it could last for ever.
        functions = [without_others(o.function, o.args) or o.function for o in self.operations]
        return [
            (function, mapped((o.args, dict(o.kwargs)), _marked), _places(o.out))
            for function, o in zip(functions, self.operations)
        ]

    @functools.cached_property
    def _foreign(self) -> list[Tensor]:
        """What is written into, and made elsewhere."""
        made, found = set[int](), list[Tensor]()
        for operation in self.operations:
            made |= operation.makes
            found += [x for x in operation.changed if memory(x) not in made]
        return found

    def products(self, weights: set[int]) -> list[Operation]:
        """The operators that multiply what lies in this memory, by a matrix product or number by number."""
        return [o for o in self.operations if not weights.isdisjoint(o.reads) and o.makes]

    @torch.no_grad()
    def __call__(self, values: Values, contents: Contents | None = None) -> Lookup:
        """Run with these numbers in some places, and with these in some memory; what is returned finds what any
        tensor of the recorded pass would be now."""
        now = _Now(dict(values), dict(contents or {}))
        for x in self._foreign:
            now.copy(x)
        for function, given, places in self._steps:
            args, kwargs = mapped(given, now.of)
            now.put(places, function(*args, **kwargs))
        return now

    @torch.no_grad()
    def at_once(
        self, changes: Sequence[Values], wanted: Sequence[Tensor], contents: Contents | None = None
    ) -> list[Tensor] | None:
        """What each of the tensors wanted would be with each of several sets of numbers in the same places, [n ...];
        None where these operators can't be run on a batch of numbers."""
        places = list(changes[0])

        def run(*numbers: Tensor) -> tuple[Tensor, ...]:
            now = self(dict(zip(places, numbers)), contents)
            return tuple(now(x) for x in wanted)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operators that torch runs one by one
                return list(torch.func.vmap(run)(*[torch.stack([one[p] for one in changes]) for p in places]))
        except RefusedError:
            raise
        except Exception as error:
            _LOG.debug("operators are repeated one change after the other: %s", error)
            return None


class _Now:
    """The tensors of a recorded pass as they are in a repetition of it."""

    def __init__(self, values: dict[Place, Tensor], contents: dict[int, torch.UntypedStorage]) -> None:
        self._values, self._contents = values, contents

    def __call__(self, x: Tensor) -> Tensor:
        return self.of(_marked(x))

    def of(self, value: Any) -> Any:
        """The tensor that stands now for a marked one; anything else as it is."""
        if type(value) is not _Mark:
            return value
        known = self._values.get(value.where)
        if known is not None:
            return known
        content = self._contents.get(value.lies_in)
        return value.x if content is None else at_place(value.x, content)

    def copy(self, x: Tensor) -> None:
        """From now on, what lies in this tensor's memory is a copy of it."""
        self._contents[memory(x)] = self._contents.get(memory(x), x.untyped_storage()).clone()

    def put(self, places: Sequence[Place], after: object) -> None:
        """Puts one tensor at the place of another, or each of several."""
        for old, new in zip(places, tensors(after), strict=True):
            self._values[old] = new


def at_place(x: Tensor, content: torch.UntypedStorage) -> Tensor:
    """The tensor that lies in this memory where x lies in its own."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(content, x.storage_offset(), x.shape, x.stride())


def _affected(operations: Sequence[Operation], changed: set[int]) -> list[Operation]:
    """The operators that read changed memory, and those that made what such an operator writes into in place."""
    reached, kept = set(changed), set[int]()
    while True:
        before = len(reached), len(kept)
        for i, operation in enumerate(operations):
            if not reached.isdisjoint(operation.reads) or not reached.isdisjoint(operation.writes):
                kept.add(i)
                reached |= operation.writes
        if before == (len(reached), len(kept)):
            return [operations[i] for i in sorted(kept)]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A tensor among arguments, with its place and memory."""

    x: Tensor
    where: Place
    lies_in: int


def _places(value: object) -> list[Place]:
    return [place(x) for x in tensors(value)]


def _marked(value: object) -> object:
    return _Mark(value, place(value), memory(value)) if isinstance(value, Tensor) else value
