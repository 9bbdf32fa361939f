"""The operators of one forward pass, with what each of them read and wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from qkeel.patching.modes import Args, Function, Kwargs, RecordingMode, function_name
from qkeel.patching.private_operators import written_arguments
from qkeel.sites.see.running_modules import tensors

# Where a tensor lies: its memory, offset, sizes, strides and number format. Two tensors at one place are the same.
Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


class Record(RecordingMode):
    """A mode that keeps every operator that runs while it is entered, and with it every tensor."""

    def __init__(self) -> None:
        super().__init__(self._keep)
        self.operations: list[Operation] = []

    def _keep(self, function: Function, args: Args, kwargs: Kwargs, out: object) -> None:
        changed = tuple(tensors(written_arguments(function, args, kwargs)))
        name = function_name(function)
        form_alone = name in _FORM_ALONE or name.startswith("new_")
        self.operations.append(
            Operation(
                function=function,
                args=args,
                kwargs=kwargs,
                out=out,
                changed=changed,
                reads=frozenset() if form_alone else frozenset(map(memory, tensors((args, kwargs)))),
                writes=frozenset(map(memory, tensors(((out,), changed)))),
            )
        )

    def reached(self, start: Iterable[int], since: int = 0) -> set[int]:
        """The memory whose numbers depend on that which is given, by the operators from number `since` on."""
        found = set(start)
        for operation in self.operations[since:]:
            if not found.isdisjoint(operation.reads):
                found |= operation.writes
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
        needed, kept, given = set(wanted), list[Operation](), given or {}
        for i in range(until - 1, since - 1, -1):
            operation = self.operations[i]
            if any(m in needed and i >= given.get(m, 0) for m in operation.writes):
                kept.append(operation)
                needed |= operation.reads.difference(unread(operation))
        return kept[::-1]

    def weights_of(self, start: Iterable[int], known: set[int], dynamic: set[int]) -> set[int]:
        """The memory of weights made of those that are given, as by a transpose or a parametrization: not what they
        are multiplied with, be that computed from the input (`dynamic`) or itself learned."""
        found = set(start)
        for operation in self.operations:
            reads = operation.reads
            if found.isdisjoint(reads) or not dynamic.isdisjoint(reads):
                continue
            if function_name(operation.function) not in _PRODUCTS or reads <= found | known:
                found |= operation.writes
        return found

    def maker(self, wanted: int, until: int) -> int:
        """The number of operators that had run when the tensor in this memory was there first."""
        numbers = (i for i in range(until - 1, -1, -1) if wanted in self.operations[i].makes)
        return next(numbers, -1) + 1
