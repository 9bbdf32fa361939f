"""Finds attention that no reader of calls recognizes, by the values that its weights multiply.

The readers of `qkeel.capture` know how a product of queries and keys reaches a softmax. Scores may also come from a sum
over features, a distance, a network, a table or an edge list, and weights may come from a sigmoid, a power or a root.
This module therefore asks the opposite question about the recorded operators of a pass. An operator is a candidate if
it normalizes values (a softmax, a quotient by their own sum) or applies a nonlinearity to them (a sigmoid, a ReLU). Its
output is a tensor of attention weights if two of its entries contribute to the same output element, each multiplied by
a value from a different position.

This is decided by an experiment. The weights are held fixed while the module's input is changed at one position, and
then at another. The derivative of an output element with respect to a weight is the value that this weight multiplies,
so the entries whose derivative changes are those that multiply a value from the changed position. Three more conditions
distinguish attention from similar computations:

- If the dimension of a softmax is known, both entries lie in the same row. In the softmax of a router or of a gate,
  this dimension holds classes or features, all of which multiply values from the same position.
- The scores depend on the positions. The scores of a table that mixes parts of one token (hyper-connections) change
  everywhere at once, and a mask does not change at all.
- Weights that are not normalized belong to pairs of positions. Either the scores show this (the weights that multiply
  one position's value all depend on that position, and some of them on the other one, or the same value is multiplied
  by another weight for another output), or the output of the module shows it: each weight carries the value of one
  position to one position, and each value has several weights. Gates, recurrences and feature maps of linear attention
  meet none of these conditions.

Operators are run again only if the weights of a candidate are combined with activations. In most models this happens
only in attention layers that are already known.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal

import torch
from torch import Tensor

from qkeel.capture.example import ModuleCall, mapped, tensors
from qkeel.functional.norms import widest
from qkeel.heads.site import UnrecognizedAttention
from qkeel.heads.walk import Operation, Record, Repetition, at_place, contents_of, memory, place, stored
from qkeel.patching.modes import function_name

_SOFTMAX = frozenset({"softmax", "safe_softmax", "sparse_softmax"})
_POWERS = frozenset({"exp", "exp2", "pow"})
_ACTIVATIONS = frozenset(
    {
        *("sigmoid", "hardsigmoid", "tanh", "relu", "threshold", "clamp_min", "clamp", "softplus", "elu", "silu"),
        *("gelu", "leaky_relu", "hardswish", "mish", "abs", "erf"),
    }
)
_CANDIDATES = _SOFTMAX | _POWERS | _ACTIVATIONS | {"div"}
_STARTS = _CANDIDATES | {"log_softmax", "sub"}  # whose input is tracked through elementwise operators
_PRODUCTS = frozenset({"mul", "addcmul"})
_CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "sparse_mm", "sparse_addmm"}
)
_ADDITIONS = frozenset({"add", "sub"})
_SUMS = _ADDITIONS | {
    *("sum", "mean", "cumsum", "index_add", "scatter_add", "scatter_reduce", "index_put", "segment_reduce"),
}
# Operators that are neither linear nor a rearrangement; their output no longer consists of weights or of products of
# weights.
_ENDS = (
    _SOFTMAX
    | _POWERS
    | _ACTIVATIONS
    | {
        *("log_softmax", "native_layer_norm", "native_group_norm", "native_batch_norm", "rsqrt", "log", "argmax"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "isinf", "max", "amax", "logsumexp", "var", "std"),
    }
)
_STATISTICS = frozenset({"std", "var", "std_mean", "var_mean", "linalg_vector_norm"})
_CHOICES = frozenset({"topk", "sort"})  # operators that return (values, indices) of a tensor along a dimension
_MOVES = _CHOICES | {
    *("view", "unsafe_view", "reshape", "reshape_alias", "flatten", "unflatten", "expand", "unsqueeze", "squeeze"),
    *("transpose", "t", "permute", "select", "slice", "index", "gather", "index_select", "as_strided", "alias"),
    *("clone", "to_copy", "to", "contiguous", "detach", "copy", "clamp", "clamp_min", "maximum", "where"),
    *("masked_fill", "cat", "stack", "split", "split_with_sizes", "unbind", "nan_to_num", "repeat", "roll"),
    *("values", "coalesce", "to_dense", "lift_fresh", "reciprocal"),
}
_OWN_SUM = "a quotient by their sum"
_NORMALIZED = {
    "softmax": "a softmax of scores",
    "exp": "exponentials of scores, divided by their sum,",
    "exp2": "powers of two with scores as exponents, divided by their sum,",
    "pow": "powers of scores, divided by their sum,",
    _OWN_SUM: "scores, divided by their sum,",
}
_TRIES = 4  # the number of sums that are examined for one candidate, spread from its first to its last
_SETTLED = 2  # after this many negative results for one computation, further calls are assumed to be negative too
_NEAR, _PAIRS = 3, 4  # positions changed on either side of the middle, and pairs of them that are compared
_SMALL = 1e-6  # a change below this fraction of the largest change is rounding
_SAME = 1e-5  # two values that differ by less than this fraction are considered equal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    """An operator whose output may be attention weights.

    Attributes:
        number: the index of the operator in the record.
        name: the name of the operator, or `_OWN_SUM`.
        weights: the output of the operator.
        scores: the tensor from which it was computed, traced back as far as there were only elementwise operations.
        normalized: whether the output is normalized; "maybe later" for exponentials that may be divided by a sum
            afterwards.
        dim: the dimension over which the output is normalized, if it is known.
    """

    number: int
    name: str
    weights: Tensor
    scores: Tensor
    normalized: Literal["yes", "maybe later", "no"]
    dim: int | None = None


def unrecognized_attention(
    record: Record,
    dynamic: set[int],
    frames: Sequence[ModuleCall],
    known: set[int],
    fused: Sequence[tuple[int, int]],
) -> list[UnrecognizedAttention]:
    """Returns the attention in a recorded pass that no reader has reported.

    Args:
        record: the operators of the pass.
        dynamic: the memory whose contents depend on the model's input.
        frames: every module call in the pass.
        known: the memory of weights that a reader has recognized.
        fused: the ranges of operators, as (first, last + 1), inside functions that are known to be attention.
    """
    search = _Search(record, dynamic, frames, known, fused)
    found = [one for one in map(search.examined, search.distinct()) if one is not None]
    unique = {(one.module, one.operation): one for one in reversed([*found, *search.normalized_twice()])}
    return list(reversed(unique.values()))


class _Search:
    """The experiments on one recorded pass. The arguments are those of `unrecognized_attention`."""

    def __init__(
        self,
        record: Record,
        dynamic: set[int],
        frames: Sequence[ModuleCall],
        known: set[int],
        fused: Sequence[tuple[int, int]],
    ) -> None:
        self.record, self.dynamic, self.frames, self.known = record, dynamic, frames, known
        self._inner: list[ModuleCall | None] = [None] * len(record.operations)  # the innermost call of each operator
        for frame in frames:  # calls inside others begin later
            until = self._last(frame)
            self._inner[frame.since : until] = [frame] * (until - frame.since)
        self.candidates = list(self._candidates(fused))
        self._negatives: collections.Counter[object] = collections.Counter()
        self._added_up: dict[int, list[tuple[int, bool]]] = {}

    # --- which operators may have computed weights

    def _candidates(self, fused: Sequence[tuple[int, int]]) -> Iterator[_Candidate]:
        """The operators whose output may be weights that no reader has recognized."""
        scores: dict[int, Tensor] = {}  # by memory, the tensor from which it was computed element by element
        for number, operation in enumerate(self.record.operations):
            name, out = operation.name, operation.out
            if name not in _STARTS and operation.reads and scores.keys().isdisjoint(operation.reads):
                continue
            given = _floats(operation.args)
            source = next((x for x in given if memory(x) in scores), None)
            start = None if source is None else scores[memory(source)]
            if source is not None and not (name in _MOVES and len(given) == 1):
                same = isinstance(out, Tensor) and out.numel() == source.numel() and name not in _CONTRACTIONS
                start = start if same else None
            if start is None and (
                (name in _CANDIDATES and name != "div") or name == "log_softmax" or _shifts(operation)
            ):
                start = next((x for x in given if x.ndim), None)
            if start is not None:
                scores |= dict.fromkeys(_made(operation), start)
            if name not in _CANDIDATES or any(first <= number < last for first, last in fused):
                continue
            if not isinstance(out, Tensor) or not out.is_floating_point() or out.numel() < 2 or not given:
                continue
            if memory(out) not in self.dynamic or memory(out) in self.known:
                continue
            found = self._candidate(number, name, operation, out, given)
            if found is not None:
                yield dataclasses.replace(found, scores=found.scores if start is None else start)

    def _candidate(
        self, number: int, name: str, operation: Operation, out: Tensor, given: list[Tensor]
    ) -> _Candidate | None:
        base, dim = operation.args[0], None
        kind: Literal["yes", "maybe later", "no"] = "no"
        if name in _SOFTMAX:
            name, kind, known = "softmax", "yes", operation.args[1]
            dim = known % out.ndim if isinstance(known, int) and out.layout == torch.strided else None
        elif name == "div":
            dims = self._own_sum(number, operation)
            if dims is None:
                return None
            name, kind, dim = _OWN_SUM, "yes", dims[0] if len(dims) == 1 else None
        elif name in _POWERS and (name != "pow" or not (isinstance(base, Tensor) and base.ndim)):
            dim = _normalized_dim(out)
            kind = "maybe later" if dim is None else "yes"
        else:  # sparse weights, such as those of sparsemax, are the output of a ReLU
            dim = _normalized_dim(out)
            kind = "no" if dim is None else "yes"
        return _Candidate(number=number, name=name, weights=out, scores=given[0], normalized=kind, dim=dim)

    def _own_sum(self, number: int, operation: Operation) -> tuple[int, ...] | None:
        """The dimensions over which the divisor of a quotient is a sum of its numerator. Empty if these are not known,
        None if the divisor is not such a sum."""
        top, below = operation.args[0], operation.args[1]
        if not (isinstance(top, Tensor) and isinstance(below, Tensor)) or below.ndim == 0:
            return None
        if not self._sums_of({memory(top)}, memory(below), number):
            return None
        wide = (1,) * (top.ndim - below.ndim) + tuple(below.shape)
        return tuple(i for i in range(top.ndim) if wide[i] == 1 < top.shape[i])

    def _sums_of(self, start: set[int], wanted: int, until: int) -> bool:
        """True if the wanted memory holds sums over the contents of the starting memory, apart from rearrangements and
        constants."""
        carriers, sums = set(start), set[int]()
        for i in self._onward((carriers, sums), 0, until):
            operation, name = self.record.operations[i], self.record.operations[i].name
            by_constants = name in ("mm", "bmm") and any(memory(x) not in self.dynamic for x in tensors(operation.args))
            if by_constants or name in _SUMS - _ADDITIONS - {"index_put", "segment_reduce"}:
                sums |= operation.writes
            elif not sums.isdisjoint(operation.reads) and name not in _ENDS | _CONTRACTIONS:
                sums |= _made(operation)
            elif name in _MOVES:
                carriers |= _made(operation)
        return wanted in sums

    def _onward(self, growing: Sequence[set[int]], since: int, until: int) -> Iterator[int]:
        """The operators from index `since` on that read any of the memory in these sets, which the caller extends
        during the iteration."""
        waiting: list[int] = []
        seen, queued = set[int](), set[int]()
        last = since - 1
        while True:
            new = set[int]().union(*growing) - seen
            seen |= new
            for i in self.record.readers(new, until) if new else ():
                if i > last and i not in queued:
                    queued.add(i)
                    heapq.heappush(waiting, i)
            if not waiting:
                return
            last = heapq.heappop(waiting)
            yield last

    def distinct(self) -> list[_Candidate]:
        """The candidates without those in the middle of a chain, such as Sinkhorn's, that normalizes the same scores
        repeatedly. All candidates of a chain reach the same sums, so the first and the last weights are sufficient to
        decide whether it is attention."""
        chains: dict[object, list[_Candidate]] = {}
        for candidate in self.candidates:
            inner = self._around(candidate.number, candidate.number)
            chain = (id(inner), memory(candidate.scores), candidate.weights.shape, tuple(self._sums(candidate)))
            chains.setdefault(chain, []).append(candidate)
        return sorted((c for chain in chains.values() for c in {chain[0], chain[-1]}), key=lambda c: c.number)

    # --- what is multiplied by the weights

    def examined(self, candidate: _Candidate) -> UnrecognizedAttention | None:
        """The attention whose weights a candidate computes, or None if the candidate computes no attention weights."""
        inner = self._around(candidate.number, candidate.number)
        sums = self._sums(candidate)
        if not sums:
            return None
        names = [o.name for o in self.record.operations[inner.since : sums[-1][0] + 1]]
        kind = (type(inner.module), candidate.number - inner.since, candidate.weights.shape, tuple(names))
        if self._negatives[kind] >= _SETTLED:
            return None
        unknown: UnrecognizedAttention | None = None
        tried = dict.fromkeys(sums[i * (len(sums) - 1) // (_TRIES - 1)] for i in range(_TRIES))
        for ends, normalized in self._apart(candidate, tried):
            frame, name = self._around(candidate.number, ends[0]), candidate.name
            how = _NORMALIZED.get(name, "sparse weights, of scores") if normalized else f"the {name} of scores"
            try:
                if not self._weighs_positions(candidate, ends, frame, normalized):
                    continue
                reason = f"values of several positions are weighted by {how} that could not be traced to q and k"
                return UnrecognizedAttention(module=frame.name, operation=name, reason=reason)
            except Exception as error:
                why = f"whether {how} weights values of several positions is unknown, as its operators can't run again"
                reason = f"{why}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                unknown = UnrecognizedAttention(module=frame.name, operation=name, reason=reason)
        self._negatives[kind] += unknown is None
        return unknown

    def _sums(self, candidate: _Candidate) -> list[tuple[int, bool]]:
        """The operators that sum the products with the weights, and whether the weights are normalized at each of
        them."""
        if candidate.number not in self._added_up:
            self._added_up[candidate.number] = [*self._sums_over(candidate)]
        return self._added_up[candidate.number]

    def _sums_over(self, candidate: _Candidate) -> Iterator[tuple[int, bool]]:
        """The operators that sum the products with the weights, if the other factors depend on the input; and whether
        the weights are normalized at each of these operators.

        Weights that are not normalized count only if one weight multiplies several elements, as an attention weight
        does with all features of a value. A gate multiplies element by element.
        """
        carriers, products, several = {memory(candidate.weights)}, set[int](), set[int]()
        inner = self._around(candidate.number, candidate.number)
        inside, until = self._last(inner), self._last(inner.parent)
        for i in self._onward((carriers, products), candidate.number + 1, until):
            operation = self.record.operations[i]
            name = operation.name
            if name in _ENDS:
                continue
            made, of_products = _made(operation), operation.reads & products
            alive = not self.dynamic.isdisjoint(operation.reads - carriers - products)
            adds = broadcasts = False
            if name in _CONTRACTIONS:
                adds = broadcasts = alive
                if not alive and i < inside and not of_products and _mixes_heads(operation, candidate):
                    carriers |= made
            elif of_products:
                adds = name == "addcmul" or (
                    name in _SUMS and (name not in _ADDITIONS or len(of_products) > 1 or not alive)
                )
                broadcasts = not several.isdisjoint(of_products)
                products |= made
            elif name in _PRODUCTS and alive and len(operation.reads) > 1:
                adds, broadcasts = name == "addcmul", _repeats(operation, carriers)
                products |= made
            elif name not in _SUMS or name in _ADDITIONS or name == "index_put":
                carriers |= made
            if broadcasts and made <= products:
                several |= made
            if adds:
                normalized = candidate.normalized == "yes" or (
                    candidate.normalized == "maybe later" and self._divided_later(candidate, i)
                )
                if normalized or broadcasts:
                    yield i, normalized

    def _apart(self, candidate: _Candidate, sums: Iterable[tuple[int, bool]]) -> Iterator[tuple[list[int], bool]]:
        """The groups of sums that are examined together. For weights that are not normalized, a group holds the sums in
        one module call, which may each belong to one query. A sum over the result of another sum is examined
        separately, as in two hops."""
        groups: dict[int, list[int]] = {}
        for end, normalized in sums:
            group = groups.setdefault(id(self._around(candidate.number, end)), [])
            if normalized or any(self._comes_from(end, first) for first in group):
                yield [end], normalized
            else:
                group.append(end)
        yield from ((group, False) for group in groups.values() if group)

    def _comes_from(self, end: int, first: int) -> bool:
        """True if an operator reads what an earlier operator wrote, or something computed from it."""
        written = self.record.operations[first].writes
        return not self.record.reached(written, first + 1, end).isdisjoint(self.record.operations[end].reads)

    def _divided_later(self, candidate: _Candidate, end: int) -> bool:
        """True if the sum weighted by the weights is later divided by the sum of the weights."""
        until = self._last(self._around(candidate.number, end).parent)
        weights, carriers = {memory(candidate.weights)}, set(self.record.operations[end].writes)
        for i in self._onward((carriers,), end + 1, until):
            operation = self.record.operations[i]
            name, given = function_name(operation.function), operation.args
            below = given[1] if name in ("div", "mul") and len(given) > 1 else None
            if isinstance(below, Tensor) and self._sums_of(weights, memory(below), i):
                return True
            if name not in _ENDS | _CONTRACTIONS:
                carriers |= _made(operation)
        return False

    def _around(self, first: int, last: int) -> ModuleCall:
        """The innermost module call in which both operators ran."""
        frame = self._inner[first] if first < len(self._inner) else None
        while frame is not None and last >= self._last(frame):
            frame = frame.parent
        return self.frames[0] if frame is None or frame.parent is None else frame

    def _last(self, frame: ModuleCall | None) -> int:
        return len(self.record.operations) if frame is None or frame.until is None else frame.until

    # --- the experiment

    def _weighs_positions(
        self, candidate: _Candidate, ends: Sequence[int], frame: ModuleCall, normalized: bool
    ) -> bool:
        """True if several entries of the weights contribute to the same element of these sums, each with the value of a
        different position.

        If that does not separate the entries, two more things are held fixed: other weights that may have been
        multiplied with these, as in a dual softmax, and standard deviations, through which every score depends on all
        positions. Weights that are zero are then replaced by nonzero ones, so that weights which choose a single
        position reveal all positions.
        """
        operations = self.record.operations
        sums = [next(iter(tensors(operations[end].out))) for end in ends]
        until, outside = (ends[-1], None) if normalized else self._outside(candidate, ends[-1], frame)
        others = {other.number for other in self.candidates if other.weights.numel() == candidate.weights.numel()}
        others |= {n for n in range(frame.since, ends[-1]) if function_name(operations[n].function) in _STATISTICS}
        inputs = self._inputs(frame, ends[-1])
        detached = {
            id(o.out)
            for o in operations[candidate.number : ends[-1]]
            if function_name(o.function) == "detach" and memory(candidate.weights) in o.reads
        }
        once = {candidate.number}
        again = bool(others - once) or bool((_dense(candidate.weights) == 0).any())
        for fixed, dense in ((once, False), (others | once, True))[: 1 + again]:
            wanted = [*sums, candidate.scores, *([] if outside is None else [outside])]
            repeated = self._repeated(wanted, until, frame.since, fixed)
            made = [_with_the_same_choice(_without_aliases(o, detached)) for o in repeated]
            for x in inputs:
                repetition = Repetition(made, {memory(x), memory(candidate.weights)})
                run = _Run(repetition, candidate, sums, x, outside=outside, dense=dense)
                base = run.at()
                for dim, n in enumerate(x.shape):
                    near = range(max(0, n // 2 - _NEAR), min(n, n // 2 + _NEAR + 1))
                    states = {at: run.at(dim, at) for at in dict.fromkeys((0, n - 1, *near))} if n > 1 else {}
                    if any(itertools.islice(_verdicts(candidate, normalized, base, [*states.values()]), _PAIRS)):
                        return True
                    few = {at: state for at, state in states.items() if at in (0, n - 1) or abs(at - n // 2) < 2}
                    if outside is not None and n > 2 and _joins_positions(base, few, x.shape, dim):
                        return True
        return False

    def _outside(self, candidate: _Candidate, end: int, frame: ModuleCall) -> tuple[int, Tensor | None]:
        """The last tensor that a module computes from a sum before it calls another module, weights the sum by the same
        weights again (as in two hops), or ends; and the index of the operator that computed it. In linear attention,
        the sum that all queries share has been multiplied by the queries at that point."""
        later = (f for f in self.frames if f.parent is frame and f.since > end and f.until is not None)
        until = min([*(f.until for f in later if f.until > f.since), self._last(frame)])  # type: ignore[operator]
        until = next((n for n, _ in self._sums(candidate) if end < n < until and self._comes_from(n, end)), until)
        carriers, last, out = set(self.record.operations[end].writes), end, None
        for i in self._onward((carriers,), end + 1, until):
            operation = self.record.operations[i]
            carriers |= _made(operation)
            if isinstance(operation.out, Tensor) and operation.out.is_floating_point() and _is_smooth(operation):
                last, out = i, operation.out
        return last, out

    def _repeated(self, wanted: Sequence[Tensor], end: int, since: int, fixed: Set[int]) -> list[Operation]:
        """The operators from index `since` to `end` on which the wanted tensors depend, without those that are fixed.
        Repeating all operators of a block would cost as much as a step of it."""
        ends = {id(self.record.operations[n]) for n in fixed}

        def unread(operation: Operation) -> Set[int]:
            return operation.reads if id(operation) in ends or not _is_smooth(operation) else frozenset()

        behind = self.record.behind({memory(x) for x in wanted}, end + 1, unread=unread, since=since)
        return [o for o in behind if id(o) not in ends and _is_smooth(o)]

    def _inputs(self, frame: ModuleCall, end: int) -> list[Tensor]:
        """The tensors that a module received as input and that depend on the model's input, or that it computed from
        integers, as an embedding does."""
        inputs = [x for x in _floats(frame.inputs) if memory(x) in self.dynamic and x.ndim > 1]
        if not inputs:
            for o in self.record.operations[frame.since : end]:
                if not any(memory(x) in self.dynamic for x in _floats(o.args)):
                    inputs += [x for x in _floats(o.out) if memory(x) in self.dynamic and x.ndim > 1]
        distinct = {memory(x): x for x in inputs}
        return list(distinct.values())[:3]

    # --- weights that are normalized a second time

    def normalized_twice(self) -> Iterator[UnrecognizedAttention]:
        """Attention whose known weights are divided by their sums, first over one dimension and then over another."""
        over: dict[int, int] = {}
        for number, operation in enumerate(self.record.operations):
            out = operation.out
            if operation.name != "div" or not isinstance(out, Tensor):
                continue
            dims = self._own_sum(number, operation) if memory(out) in self.known else None
            if dims is None or len(dims) != 1:
                continue
            before = over.get(memory(operation.args[0]))
            if before is not None and before != dims[0]:
                frame = self._around(number, number)
                reason = f"its weights are normalized over dimension {before} and then over dimension {dims[0]}"
                yield UnrecognizedAttention(module=frame.name, operation="div", reason=reason)
            over[memory(out)] = dims[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _State:
    """One repetition: the weights as a leaf of its graph, the sums to which they contribute, the scores, and the
    module's output computed from the sums. `again` draws different values for the position that was changed."""

    weights: Tensor
    sums: tuple[Tensor, ...]
    scores: Tensor
    outside: Tensor | None
    again: Callable[[int], _State]

    def numbers(self) -> Tensor:
        """All elements of the sums, concatenated."""
        return torch.cat([x.flatten() for x in self.sums])

    def neighbours(self, index: int) -> Iterator[int]:
        """The indices of the elements before and after one element, along each dimension of its sum, and of the
        elements at the same place in the other sums."""
        first = 0
        sizes = [x.numel() for x in self.sums]
        which = next(i for i in range(len(sizes)) if index < sum(sizes[: i + 1]))
        inside = index - sum(sizes[:which])
        shape = self.sums[which].shape
        for dim, size in enumerate(shape):
            step = math.prod(shape[dim + 1 :])
            at = inside // step % size
            yield from (index + (other - at) * step for other in (at - 1, at + 1) if 0 <= other < size)
        for i, size in enumerate(sizes):
            if i != which and self.sums[i].shape == shape:
                yield first + inside
            first += size

    def derivative(self, index: int) -> Tensor:
        """The derivative of one element of the sums with respect to each weight."""
        return self._of(self.numbers()[index])

    def mixed_derivative(self, factors: Tensor) -> Tensor:
        """The derivative of all elements of the sums, each multiplied by a separate factor and added up."""
        return self._of((self.numbers() * factors).sum())

    def of_position(self, dim: int, position: int) -> Tensor:
        """The derivative of all that the module outputs at one position, with a random factor for each element."""
        assert self.outside is not None
        made = self.outside.select(dim, position)
        return self._of((made * torch.randn(made.shape, generator=torch.Generator().manual_seed(0)).to(made)).sum())

    def _of(self, number: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(number, self.weights, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.weights) if found is None else _dense(found)


class _Run:
    """Repetitions of a part of a module with the same weights and different inputs."""

    def __init__(
        self,
        again: Repetition,
        candidate: _Candidate,
        sums: Sequence[Tensor],
        given: Tensor,
        *,
        outside: Tensor | None,
        dense: bool,
    ) -> None:
        """Takes the part that is repeated. If `dense`, weights that are zero are replaced too."""
        self.again, self.candidate, self.out, self.given, self.dense = again, candidate, sums, given, dense
        self.outside = outside

    def at(self, dim: int | None = None, position: int = 0, seed: int = 0) -> _State:
        """The state with the recorded input, or with other values at one position of a dimension of the input."""
        weights = self.candidate.weights.detach().clone()
        if weights.layout == torch.strided:
            # The weights get other values, so that nothing is hidden where all weights are zero, or where they are
            # subtracted from themselves as in a straight-through estimator. Weights that a mask set to zero stay zero,
            # unless `dense` is set: if the weights choose one position, no other values would reveal a second one.
            noise = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)).to(weights)
            weights = weights * (1 + noise) if bool(weights.any()) and not self.dense else 1 + noise
        weights.requires_grad_()
        contents = {}
        if dim is not None:
            content = contents_of(self.given)
            part = stored(at_place(self.given.detach(), content).select(dim, position))
            noise = torch.Generator().manual_seed(1000 * seed + position)
            size = self.given.detach().float().std().nan_to_num(1.0).clamp_min(0.1).item()
            part.add_(size * torch.randn(part.shape, generator=noise).to(part))
            contents[memory(self.given)] = content
        now = self.again.with_graph({place(self.candidate.weights): weights}, contents)
        return _State(
            weights=weights,
            sums=tuple(now(x) for x in self.out),
            scores=_dense(now(self.candidate.scores).detach()),
            outside=None if self.outside is None else now(self.outside),
            again=functools.partial(self.at, dim, position),
        )


def _verdicts(candidate: _Candidate, normalized: bool, base: _State, states: Sequence[_State]) -> Iterator[bool]:
    """For each pair of positions that reach the same element: whether one entry of the weights multiplies a value from
    the first position, and another entry of the same row a value from the second."""
    moved = [_moved(base.numbers().detach(), state.numbers().detach()) for state in states]
    for (one, here), (two, there) in itertools.combinations(zip(states, moved), 2):
        both = (here & there).nonzero().flatten()
        if len(both):
            yield _differ(candidate, normalized, base, (one, two), both)


def _differ(
    candidate: _Candidate, normalized: bool, base: _State, changed: tuple[_State, _State], both: Tensor
) -> bool:
    """The verdict on two positions and the elements that both reach."""
    scored = [_moved(base.scores, state.scores) for state in changed]
    if torch.equal(*scored) and (bool(scored[0].any()) or candidate.name == _OWN_SUM):
        return False
    for n in dict.fromkeys(int(both[i]) for i in (0, len(both) // 2, len(both) - 1)):
        before = base.derivative(n)
        mine = [_moved(before, state.derivative(n)) for state in changed]
        alone = mine[0] & ~mine[1], mine[1] & ~mine[0]
        if all(bool(x.any()) for x in alone) and (
            candidate.dim is None or bool((alone[0].any(candidate.dim) & alone[1].any(candidate.dim)).any())
        ):
            if normalized:
                return True
            common = _common(changed, before, n, mine)
            common = common if candidate.normalized == "maybe later" else max(common, 0.01)  # for feature maps
            return common <= 0.5 and any(
                _of_pairs(base, changed[i], n, before, alone[i], scored[:: -1 if i else 1], common) for i in (0, 1)
            )
    return False


def _joins_positions(base: _State, states: Mapping[int, _State], shape: Sequence[int], dim: int) -> bool:
    """True if the entries of the weights belong to pairs of positions, so that each carries the value of one position
    of the input to one position of the module's output, and one value has several of them.

    This is true whether the scores are computed from two tokens, from one of them, or from all. Features of linear
    attention and what a recurrence writes reach many positions of the output, a gate belongs to one value, and the
    weights that a router assigns to a token multiply only values of this token.

    Args:
        base: the state with the recorded input.
        states: the states with other values at one position of the input each, keyed by this position.
        shape: the sizes of the input.
        dim: the dimension of the input that holds the positions. The output has its positions in the same dimension if
            it has the same number of dimensions.
    """
    assert base.outside is not None
    out = base.outside.shape
    dims = [dim] if len(out) == len(shape) else range(len(out))
    return any(_joined(base, states, d) for d in dims if out[d] == shape[dim])


def _joined(base: _State, states: Mapping[int, _State], dim: int) -> bool:
    """The verdict of `_joins_positions` on one dimension of the output."""
    rows = {at: base.of_position(dim, at) for at in states}
    meets = {
        (at, other): _moved(rows[at], state.of_position(dim, at))
        for at in states
        for other, state in states.items()
        if other != at
    }
    for (one, two), shared in itertools.product(itertools.permutations(states, 2), states):
        if shared in (one, two) or bool(((rows[one] != 0) & (rows[two] != 0)).any()):
            continue
        if bool(meets[one, shared].any()) and bool(meets[two, shared].any()):
            # The gate of a branch that reads some positions multiplies the values of several positions.
            mine = meets[one, shared]
            others = [meets[one, other] for other in states if other not in (one, shared)]
            if any(bool(other.any()) for other in others) and not any(bool((mine & other).any()) for other in others):
                return not _told_apart(base, states, dim, shared, mine)
    return False


def _told_apart(base: _State, states: Mapping[int, _State], dim: int, shared: int, mine: Tensor) -> bool:
    """True if another dimension of the output belongs to the positions of the values, as in the scores of an indexer.
    Each element of the output is then computed from a single value's position, so nothing is summed over positions."""
    assert base.outside is not None
    sizes = base.outside.shape
    return any(
        not any(bool(((base.of_position(d, at) != 0) & mine).any()) for at in states if at != shared)
        for d in range(len(sizes))
        if d != dim and sizes[d] == sizes[dim]
    )


def _common(changed: tuple[_State, _State], before: Tensor, number: int, mine: list[Tensor]) -> float:
    """The fraction of weights that multiply values of both positions. A feature that is switched off for one random
    draw, for example by a ReLU, is switched on by another draw."""
    for seed in range(1, 5):
        mine = [
            one | _moved(before, state.again(seed).derivative(number)) for one, state in zip(mine, changed, strict=True)
        ]
    common = int((mine[0] & mine[1]).sum())
    return common / min(int(x.sum()) for x in mine)


def _of_pairs(
    base: _State, one: _State, number: int, before: Tensor, alone: Tensor, scored: Sequence[Tensor], common: float
) -> bool:
    """True if two conditions hold. Some but not all of the weights that multiply one position's value depend on the
    other position. In addition, all of them depend on the first position, or another weight multiplies the same value
    for another output."""
    if scored[0].shape != base.weights.shape:
        return False
    numbers = base.numbers()
    factors = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(0)).to(numbers)
    meets = _moved(base.mixed_derivative(factors), one.mixed_derivative(factors))
    here, there = (x[meets] for x in scored)
    if not bool(there.any()) or bool(there.all()):
        return False
    return bool(here.all()) or (common == 0 and _weighed_elsewhere(base, one, number, before, alone))


def _weighed_elsewhere(base: _State, one: _State, number: int, before: Tensor, alone: Tensor) -> bool:
    """True if a value that contributes to one element of the sums is multiplied by another weight for a neighbouring
    element, as the value of a key is for another query."""
    values = before[alone]
    for index in base.neighbours(number):
        now = base.derivative(index)
        elsewhere = now[_moved(now, one.derivative(index)) & ~alone]
        if bool(((elsewhere[:, None] - values).abs() <= _SAME * values.abs()).any()):
            return True
    return False


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """A mask of the elements in which two tensors differ by more than rounding."""
    change = (after - before).abs().nan_to_num(0.0, posinf=0.0)  # hidden elements stay hidden
    return change > _SMALL * change.amax().clamp_min(torch.finfo(change.dtype).tiny)


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout != torch.strided else x


def _floats(value: object) -> list[Tensor]:
    return [x for x in tensors(value) if x.is_floating_point()]


def _made(operation: Operation) -> set[int]:
    """The memory of the floating-point or complex tensors (not of indices) that an operator returned or wrote to."""
    made = (x for x in tensors((operation.out, operation.changed)) if x.is_floating_point() or x.is_complex())
    return {memory(x) for x in made} & (operation.makes or operation.writes)


def _normalized_dim(x: Tensor) -> int | None:
    """The dimension along which the values sum to one, or None if there is no such dimension."""
    if x.layout != torch.strided:
        return None
    rounding = max(8 * torch.finfo(x.dtype).eps * max(x.shape, default=1), 1e-6)
    total = float(x.detach().sum(dtype=widest(x.device)))  # if all lines sum to one, this is their number
    for dim in reversed(range(x.ndim)):
        n = x.shape[dim]
        likely = n > 1 and abs(total * n / x.numel() - 1) < 2 * rounding and bool(x.isfinite().all())
        if likely and bool(((x.sum(dim) - 1).abs() < rounding).all()):
            return dim
    return None


def _is_smooth(operation: Operation) -> bool:
    """False if the output of an operator contains no floating-point or complex values, or if the operator would cut the
    graph."""
    numbers = any(x.is_floating_point() or x.is_complex() for x in tensors(operation.out))
    return numbers and function_name(operation.function) != "detach"


def _with_the_same_choice(operation: Operation) -> Operation:
    """The operator itself, or, for an operator that chooses elements, one that takes the elements at the recorded
    indices, so that a router sends each token to the same place as before."""
    if function_name(operation.function) not in _CHOICES:
        return operation
    _, indices = operation.out  # type: ignore[misc]
    given = operation.args[0]
    dim = next((d for d in operation.args[2:] if type(d) is int), -1)
    if function_name(operation.function) == "sort":
        dim = next((d for d in operation.args[1:] if type(d) is int), operation.kwargs.get("dim", -1))

    def choose(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return x.gather(dim, indices) if x.ndim else x, indices

    assert isinstance(given, Tensor)
    return dataclasses.replace(operation, function=choose, kwargs={})


def _shifts(operation: Operation) -> bool:
    """True for the subtraction of, or division by, a smaller tensor with one value per row, such as the largest score,
    the logsumexp or the deviation."""
    given = [x for x in operation.args if isinstance(x, Tensor)]
    return (
        function_name(operation.function) in ("sub", "div") and len(given) == 2 and given[0].numel() > given[1].numel()
    )


def _without_aliases(operation: Operation, detached: set[int]) -> Operation:
    """The operator with copies in place of detached weights, so that these are not changed."""
    if not any(id(x) in detached for x in tensors(operation.args)):
        return operation
    copies = mapped(operation.args, lambda x: x.clone() if id(x) in detached else x)
    return dataclasses.replace(operation, args=copies)


def _repeats(operation: Operation, carriers: set[int]) -> bool:
    """True if a product has more elements than the factor that holds the weights, so that each weight multiplies
    several elements."""
    weights = [x for x in tensors(operation.args) if memory(x) in carriers]
    own = max(math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step) for x in weights)
    return any(x.numel() > own for x in tensors(operation.out))


def _mixes_heads(operation: Operation, candidate: _Candidate) -> bool:
    """True if a product with a parameter may have mixed the heads of a softmax's weights, as in talking-heads
    attention."""
    out = operation.out
    return candidate.name == "softmax" and isinstance(out, Tensor) and out.numel() == candidate.weights.numel()
