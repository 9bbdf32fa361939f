"""Operators of a recorded pass, run again with other numbers in some places, and the logits that they give then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.patching.parallel_training import without_others
from qkeel.sites.calls.logit_statistics import Seen
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.see.running_modules import mapped, tensors
from qkeel.sites.verify.recorded_operators import Operation, Place, memory, place
from qkeel.spec import AttentionCall

Values = Mapping[Place, Tensor]
Contents = Mapping[int, torch.UntypedStorage]
Lookup = Callable[[Tensor], Tensor]


class Repetition:
    """Operators that can be run again with other numbers in some places; those that would do the same are left out."""

    def __init__(self, operations: Sequence[Operation], changed: set[int]) -> None:
        """Takes the operators in their order, and the memory whose numbers will be others."""
        self._operations = _affected(operations, changed)
        # Another process may repeat other operators, or none: waiting for it could last for ever.
        functions = [without_others(o.function, o.args) or o.function for o in self._operations]
        self._steps = [
            (function, mapped((o.args, dict(o.kwargs)), _marked), _places(o.out))
            for function, o in zip(functions, self._operations)
        ]
        made: set[int] = set()
        self._foreign: list[Tensor] = []  # what is written into, and made elsewhere
        for operation in self._operations:
            made |= operation.makes
            self._foreign += [x for x in operation.changed if memory(x) not in made]

    def products(self, weights: set[int]) -> list[Operation]:
        """The operators that multiply what lies in this memory, by a matrix product or number by number."""
        return [o for o in self._operations if not weights.isdisjoint(o.reads) and o.makes]

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


_ROWS = 32  # enough to see a head's logits move


def unchanged(x: Tensor) -> Tensor:
    """The tensor itself: nothing was repeated."""
    return x


class RepeatedLogits:
    """Reads the logits [b h t s] of a site's calls, NaN where a key is hidden."""

    def __init__(self, calls: Sequence[Seen]) -> None:
        self._headless = isinstance(calls[0], ScoresCall) and calls[0].headless
        self._calls = calls
        self.tensors = [x for call in self._calls for x in _tensors(call)]
        self._rows = [_rows(call) for call in self._calls]

    @torch.no_grad()
    def __call__(self, now: Lookup = unchanged) -> list[Tensor]:
        found = [_logits(call, rows, now) for call, rows in zip(self._calls, self._rows)]
        return [torch.cat(found, 1)] if self._headless else found


def _tensors(call: AttentionCall | ScoresCall) -> list[Tensor]:
    """The tensors that the logits are read from."""
    if isinstance(call, ScoresCall):
        return [call.logits]
    mask = [] if call.mask is None or call.mask.dtype == torch.bool else [call.mask]
    return [call.q, call.k, *mask]


@torch.no_grad()
def _rows(call: AttentionCall | ScoresCall) -> slice:
    """The last rows or the first, whichever have more logits: some are of padding."""
    t = call.query_shape[1]
    last, first = slice(max(0, t - _ROWS), t), slice(0, min(t, _ROWS))
    return max(last, first, key=lambda rows: int(_logits(call, rows, unchanged).nan_to_num(0.0).count_nonzero()))


def _logits(call: AttentionCall | ScoresCall, rows: slice, now: Lookup) -> Tensor:
    if isinstance(call, ScoresCall):
        z = now(call.logits)[:, :, rows]
        z, visible = z.to(wide(z.dtype)), None
        if call.hidden is not None:
            visible = ~(call.hidden[:, :, rows] if call.hidden.shape[2] > 1 else call.hidden)
    else:
        mask = call.mask if call.mask is None else now(call.mask)
        changed = dataclasses.replace(call, q=now(call.q), k=now(call.k), mask=mask)
        q, k = changed.encoded()
        keys = slice(0, k.shape[2])
        z, visible = changed.scores(q[:, :, rows], k, rows, keys), changed.visible(rows, keys)
    seen = z.isfinite() & (z > torch.finfo(call.logits.dtype if isinstance(call, ScoresCall) else call.q.dtype).min / 2)
    return z.masked_fill(~(seen if visible is None else seen & visible), torch.nan)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """|b - a|, zero where a key is hidden in either."""
    return (b - a).abs().nan_to_num(0.0)
