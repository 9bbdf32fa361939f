"""Attention that no reader recognises, found by what its weights multiply.

The readers of `qkeel.capture` know the paths from a product of queries and keys to a softmax. Scores may also come from
a sum over features, a distance, a network, a table or an edge list, and weights from a sigmoid or a root. This module
asks the reverse question, about the recorded operators of a pass. An operator makes weights if it normalises numbers (a
softmax, a quotient by their own sum), or bends them (a sigmoid, a ReLU). Its output is attention if two of its entries
reach one number of the output, each times a value of a different position.

An experiment decides. The weights are held fixed; the module's input is changed at one position, then at another. The
entries whose derivative moves are those that multiply a value of that position. Three more facts distinguish attention
from what looks like it:

- Of a softmax over a known dimension the two entries lie in one row: the softmax of a router or of a gate has classes
  or features there, and all of them multiply what one position holds.
- The scores depend on the positions: those of a table that mixes parts of one token (hyper-connections) change as a
  whole, and a mask does not change.
- Weights that are not normalised are scores of pairs: those that multiply one position's value all change with that
  position, some of them also with the other one, and some do not. Gates and feature maps of linear attention fail this.

Nothing is run again unless an operator's weights meet activations; most models have none outside known attention.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from qkeel.capture.example import ModuleCall, tensors
from qkeel.heads.site import UnrecognizedAttention
from qkeel.heads.walk import Operation, Record, Repetition, at_place, memory, place
from qkeel.patching.modes import function_name

_LOG = logging.getLogger(__name__)

_SOFTMAX = frozenset({"softmax", "safe_softmax", "sparse_softmax"})
_QUOTIENTS = frozenset({"div", "true_divide", "divide", "mul"})  # mul: by a reciprocal
_POWERS = frozenset({"exp", "exp2", "pow"})
_BENT = frozenset({"sigmoid", "hardsigmoid", "tanh", "relu", "threshold", "clamp_min", "clamp", "softplus", "elu"})
_MAKERS = _SOFTMAX | _POWERS | _BENT | {"div"}
_PRODUCTS = frozenset({"mul", "addcmul"})
_CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "sparse_mm", "sparse_addmm"}
)
_SUMS = frozenset(
    {"sum", "mean", "add", "sub", "cumsum", "index_add", "scatter_add", "scatter_reduce", "index_put", "segment_reduce"}
)
# What neither is linear nor moves numbers: what comes out of it are no weights, and no products of them.
_ENDS = (
    _SOFTMAX
    | _BENT
    | {
        "silu",
        "gelu",
        "log_softmax",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "rsqrt",
        "log",
        "argmax",
        "topk",
    }
    | {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isfinite",
        "isnan",
        "isinf",
        "max",
        "amax",
        "sort",
        "logsumexp",
        "var",
        "std",
    }
)
# What moves, casts or picks numbers.
_MOVES = frozenset(
    {
        *("view", "unsafe_view", "reshape", "reshape_alias", "flatten", "unflatten", "expand", "unsqueeze", "squeeze"),
        *("transpose", "t", "permute", "select", "slice", "index", "gather", "index_select", "as_strided", "alias"),
        *("clone", "to_copy", "to", "contiguous", "detach", "copy", "clamp", "clamp_min", "maximum", "where"),
        *("masked_fill", "cat", "stack", "split", "split_with_sizes", "unbind", "nan_to_num", "repeat", "roll"),
        *("values", "coalesce", "to_dense", "lift_fresh", "reciprocal"),
    }
)
_OWN_SUM = "a quotient by their sum"
_TRIES = 4  # sums that are looked at behind one operator
_SETTLED = 2  # operators of one kind, in modules of one class, after which further ones are taken to be no attention
_NEAR, _PAIRS = 3, 4  # places on either side of the middle one that are changed, and pairs of them that are looked at
_SMALL = 1e-6  # a share of the largest change that is rounding: what does not depend on a place stays as it was


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Maker:
    """An operator that may have made weights: its number, its output, the scores that it took, whether its output is
    normalised, and over which dimension, where that is known."""

    number: int
    name: str
    weights: Tensor
    scores: Tensor
    normal: Literal["yes", "later", "no"]
    dim: int | None = None


def unowned_attention(
    record: Record,
    dynamic: set[int],
    frames: Sequence[ModuleCall],
    owned: set[int],
    fused: Sequence[tuple[int, int]],
) -> list[UnrecognizedAttention]:
    """The attentions of a recorded pass that no reader has reported.

    Args:
        record: the operators of the pass.
        dynamic: the memory whose numbers depend on the model's input.
        frames: every call of a module.
        owned: the memory of weights that a reader knows.
        fused: the ranges of operators within which a function that is known to be attention ran.
    """
    search = _Search(record, dynamic, frames)
    found: dict[tuple[str, str], UnrecognizedAttention] = {}
    for maker in search.makers(owned, fused):
        missed = search.judged(maker)
        if missed is not None:
            found.setdefault((missed.module, missed.operation), missed)
    for missed in search.twice(owned):
        found.setdefault((missed.module, missed.operation), missed)
    return list(found.values())


class _Search:
    """The experiments on one recorded pass."""

    def __init__(self, record: Record, dynamic: set[int], frames: Sequence[ModuleCall]) -> None:
        self.record, self.dynamic, self.frames = record, dynamic, frames
        self._negatives: dict[tuple[type[nn.Module], str], set[int]] = collections.defaultdict(set)

    # --- which operators may have made weights

    def makers(self, owned: set[int], fused: Sequence[tuple[int, int]]) -> Iterator[_Maker]:
        """The operators whose output may be weights that no reader knows."""
        roots: dict[int, Tensor] = {}  # by memory: the scores that something was bent or normalised from first
        for number, operation in enumerate(self.record.operations):
            name = function_name(operation.function)
            root = next((roots[m] for m in operation.reads if m in roots), None)
            if name in _MAKERS and name != "div" and root is None:
                root = next((x for x in tensors(operation.args) if x.is_floating_point() and x.ndim), None)
            if root is not None and name not in _CONTRACTIONS:
                roots |= dict.fromkeys(operation.makes, root)
            if name not in _MAKERS or any(first <= number < last for first, last in fused):
                continue
            out = operation.out
            if not isinstance(out, Tensor) or not out.is_floating_point() or out.numel() < 2:
                continue
            if memory(out) not in self.dynamic or memory(out) in owned:
                continue
            maker = self._maker(number, name, operation, out)
            if maker is not None:
                yield dataclasses.replace(maker, scores=roots.get(memory(out), maker.scores))

    def _maker(self, number: int, name: str, operation: Operation, out: Tensor) -> _Maker | None:
        given = [x for x in tensors(operation.args) if x.is_floating_point()]
        if not given:
            return None
        if name in _SOFTMAX:
            dim = operation.args[1]
            known = dim % out.ndim if isinstance(dim, int) and out.layout == torch.strided else None
            return _Maker(number=number, name="softmax", weights=out, scores=given[0], normal="yes", dim=known)
        if name == "div":
            dims = self._own_sum(number, operation)
            if dims is None:
                return None
            dim = dims[0] if len(dims) == 1 else None
            return _Maker(number=number, name=_OWN_SUM, weights=out, scores=given[0], normal="yes", dim=dim)
        if name == "pow" and isinstance(operation.args[1], Tensor):  # a constant to the power of scores
            given = [operation.args[1]]
        if name in ("exp", "exp2") or (name == "pow" and len(given) == 1 and not isinstance(operation.args[0], Tensor)):
            dim = _normalised(out)
            kind: Literal["yes", "later"] = "later" if dim is None else "yes"
            return _Maker(number=number, name=name, weights=out, scores=given[0], normal=kind, dim=dim)
        return _Maker(number=number, name=name, weights=out, scores=given[0], normal="no")

    def _own_sum(self, number: int, operation: Operation) -> tuple[int, ...] | None:
        """The dimensions over which a quotient's divisor is a sum of its numerator; empty where they are not known,
        None where the divisor is something else."""
        top, below = operation.args[0], operation.args[1]
        if not (isinstance(top, Tensor) and isinstance(below, Tensor)) or below.ndim == 0:
            return None
        if not self._sums_of({memory(top)}, memory(below), number):
            return None
        wide = (1,) * (top.ndim - below.ndim) + tuple(below.shape)
        return tuple(i for i in range(top.ndim) if wide[i] == 1 < top.shape[i])

    def _sums_of(self, start: set[int], wanted: int, until: int) -> bool:
        """True if a memory holds sums over what lies in another one, apart from moves and constants."""
        carriers, sums = set(start), set[int]()
        for i in self._onward(carriers, -1, until, sums):
            operation, name = self.record.operations[i], function_name(self.record.operations[i].function)
            if name in ("sum", "mean", "index_add", "scatter_add", "scatter_reduce", "cumsum") or (
                name in ("mm", "bmm") and any(memory(x) not in self.dynamic for x in tensors(operation.args))
            ):
                sums |= operation.writes
            elif not sums.isdisjoint(operation.reads) and name not in _ENDS | _POWERS | _CONTRACTIONS:
                sums |= operation.makes or operation.writes
            elif _moves(operation):
                carriers |= operation.makes or operation.writes
        return wanted in sums

    def _onward(self, carriers: set[int], since: int, until: int, more: set[int]) -> Iterator[int]:
        """The operators that read any of a growing memory, in their order."""
        last = since
        for _ in range(200):
            ahead = [i for i in self.record.readers(carriers | more, until) if i > last]
            if not ahead:
                return
            last = ahead[0]
            yield last

    # --- what they multiply

    def judged(self, maker: _Maker) -> UnrecognizedAttention | None:
        """The attention whose weights are an operator's output; None if it is none."""
        inner = self._around(maker.number, maker.number)
        negatives = self._negatives[type(inner.module), maker.name]
        if id(inner) not in negatives and len(negatives) >= _SETTLED:
            return None
        ends = list(self._ends(maker))
        for end in ends[:_TRIES]:
            frame = self._around(maker.number, end)
            try:
                shown = self._weighs(maker, end, frame)
            except Exception as error:
                _LOG.debug("what %s of %s multiplies could not be looked at: %s", maker.name, frame.name, error)
                continue
            if shown:
                how = _WORDS.get(maker.name, f"the {maker.name} of scores")
                reason = f"values of several positions are weighed by {how} that were not followed to queries and keys"
                return UnrecognizedAttention(module=frame.name, operation=maker.name, reason=reason)
        if ends:
            negatives.add(id(inner))
        return None

    def _ends(self, maker: _Maker) -> Iterator[int]:
        """The operators that add up what the weights were multiplied by, where that depends on the input."""
        carriers, met = {memory(maker.weights)}, set[int]()
        inner = self._around(maker.number, maker.number)
        inside, until = self._last(inner), self._last(inner.parent)
        for i in self._onward(carriers, maker.number, until, met):
            operation = self.record.operations[i]
            name = function_name(operation.function)
            if name in _ENDS or name in _POWERS:
                continue
            alive = not self.dynamic.isdisjoint(operation.reads - carriers - met)
            if name in _CONTRACTIONS:
                if alive and (maker.normal != "later" or self._divided_later(maker, i)):
                    yield i
                elif i < inside and met.isdisjoint(operation.reads) and _mixes_heads(operation, maker):
                    carriers |= operation.makes
            elif not met.isdisjoint(operation.reads):
                several = name not in ("add", "sub") or len(operation.reads & met) > 1 or not alive
                if (
                    (name in _SUMS or name == "addcmul")
                    and several
                    and (maker.normal != "later" or self._divided_later(maker, i))
                ):
                    yield i
                met |= operation.makes or operation.writes
            elif name in _PRODUCTS and alive and len(operation.reads) > 1:
                met |= operation.makes or operation.writes
                if name == "addcmul":
                    yield i
            elif name not in _SUMS or name in ("add", "sub", "index_put"):
                carriers |= operation.makes or operation.writes

    def _divided_later(self, maker: _Maker, end: int) -> bool:
        """True if what weights without a norm made is divided by their sum afterwards."""
        until = self._last(self._around(maker.number, end).parent)
        weights, carriers = {memory(maker.weights)}, set(self.record.operations[end].writes)
        for i in self._onward(carriers, end, until, set()):
            operation = self.record.operations[i]
            name, given = function_name(operation.function), operation.args
            below = given[1] if name in ("div", "mul") and len(given) > 1 else None
            if isinstance(below, Tensor) and self._sums_of(weights, memory(below), i):
                return True
            if name not in _ENDS | _POWERS | _CONTRACTIONS:
                carriers |= operation.makes or operation.writes
        return False

    def _around(self, first: int, last: int) -> ModuleCall:
        """The innermost call of a module in which both operators ran."""
        inside = [f for f in self.frames if f.since <= first and last < self._last(f)]
        return max(inside, key=lambda f: (f.since, len(f.line())), default=self.frames[0])

    def _last(self, frame: ModuleCall | None) -> int:
        return len(self.record.operations) if frame is None or frame.until is None else frame.until

    # --- the experiment

    def _weighs(self, maker: _Maker, end: int, frame: ModuleCall) -> bool:
        """True if entries of the weights reach one number of the sum, each with a value of its own position."""
        operations = self.record.operations
        sums = next(x for x in tensors(operations[end].out))
        inputs = self._inputs(frame, end)
        for x in inputs:
            made = [
                o
                for n, o in enumerate(operations[frame.since : end + 1], frame.since)
                if n != maker.number and _is_smooth(o)
            ]
            run = _Run(Repetition(made, {memory(x), memory(maker.weights)}), maker, sums, x)
            base = run.at()
            for dim, n in enumerate(x.shape):
                middle = n // 2
                near = {0, n - 1, *range(max(0, middle - _NEAR), min(n, middle + _NEAR + 1))}
                states = [run.at(dim, at) for at in sorted(near)] if n > 1 else []
                if any(itertools.islice(_verdicts(maker, base, states), _PAIRS)):
                    return True
        return False

    def _inputs(self, frame: ModuleCall, end: int) -> list[Tensor]:
        """What the module was given, or what it looked up, where those are numbers of tokens."""
        inputs = [x for x in frame.inputs if x.is_floating_point() and memory(x) in self.dynamic and x.ndim > 1]
        if not inputs:
            looked = [o for o in self.record.operations[frame.since : end] if function_name(o.function) == "embedding"]
            inputs = [x for o in looked for x in tensors(o.out) if memory(x) in self.dynamic]
        distinct = {memory(x): x for x in inputs}
        return list(distinct.values())[:3]

    # --- weights that are normalised a second time

    def twice(self, owned: set[int]) -> Iterator[UnrecognizedAttention]:
        """Attention whose known weights are divided by their sums over one dimension after another."""
        over: dict[int, int] = {}
        for number, operation in enumerate(self.record.operations):
            out = operation.out
            if function_name(operation.function) != "div" or not isinstance(out, Tensor) or memory(out) not in owned:
                continue
            dims = self._own_sum(number, operation)
            if dims is None or len(dims) != 1:
                continue
            before = over.get(memory(operation.args[0]))
            if before is not None and before != dims[0]:
                frame = self._around(number, number)
                reason = f"its weights are normalised over dimension {before} and then over dimension {dims[0]}"
                yield UnrecognizedAttention(module=frame.name, operation="div", reason=reason)
            over[memory(out)] = dims[0]


_WORDS = {
    "softmax": "a softmax of scores",
    "exp": "exponentials over their sum, of scores",
    "exp2": "powers of two over their sum, of scores",
    "pow": "powers over their sum, of scores",
    _OWN_SUM: "numbers over their sum, of scores",
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Numbers of one repetition: the weights as a leaf of a graph, the sums that they are in, the scores; and how to
    have the same place hold still other numbers."""

    weights: Tensor
    sums: Tensor
    scores: Tensor
    again: Callable[[int], _State]

    def derivative(self, place: int) -> Tensor:
        """The derivative of one number of the sums by each weight."""
        (found,) = torch.autograd.grad(self.sums.flatten()[place], self.weights, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.weights) if found is None else _dense(found)

    def mixture(self, factors: Tensor) -> Tensor:
        """The derivative of all numbers of the sums, each times its own factor, by each weight."""
        (found,) = torch.autograd.grad((self.sums * factors).sum(), self.weights, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.weights) if found is None else _dense(found)


class _Run:
    """Repetitions of a part of a module with the same weights and another input."""

    def __init__(self, again: Repetition, maker: _Maker, sums: Tensor, given: Tensor) -> None:
        self.again, self.maker, self.out, self.given = again, maker, sums, given

    def at(self, dim: int | None = None, place_there: int = 0, seed: int = 0) -> _State:
        """The numbers as they were, or with others at one place of a dimension of the input."""
        weights = self.maker.weights.detach().clone().requires_grad_()
        contents = {}
        if dim is not None:
            content = self.given.detach().untyped_storage().clone()
            part = at_place(self.given.detach(), content).select(dim, place_there)
            noise = torch.Generator().manual_seed(1000 * seed + place_there)
            size = self.given.detach().float().std().nan_to_num(1.0).clamp_min(0.1).item()
            part.add_(size * torch.randn(part.shape, generator=noise).to(part))
            contents[memory(self.given)] = content
        now = self.again.with_graph({place(self.maker.weights): weights}, contents)
        return _State(
            weights=weights,
            sums=now(self.out),
            scores=_dense(now(self.maker.scores).detach()),
            again=functools.partial(self.at, dim, place_there),
        )


def _verdicts(maker: _Maker, base: _State, states: Sequence[_State]) -> Iterator[bool]:
    """Of two places that reach one number: whether an entry of the weights multiplies what lies at one, another one of
    its row what lies at the other."""
    moved = [_moved(base.sums.detach(), state.sums.detach()) for state in states]
    for (one, here), (two, there) in itertools.combinations(zip(states, moved), 2):
        both = (here & there).flatten().nonzero().flatten()
        if len(both):
            yield _differ(maker, base, (one, two), both)


def _differ(maker: _Maker, base: _State, changed: tuple[_State, _State], both: Tensor) -> bool:
    """The verdict on two places and the numbers that both reach."""
    scored = [_moved(base.scores, state.scores) for state in changed]
    if torch.equal(*scored) and (bool(scored[0].any()) or maker.name == _OWN_SUM):
        return False
    if maker.normal == "no" and not _of_pairs(base, changed[0], scored):
        return False
    for n in dict.fromkeys((0, len(both) // 2, len(both) - 1)):
        before = base.derivative(int(both[n]))
        mine = [_moved(before, state.derivative(int(both[n]))) for state in changed]
        alone = mine[0] & ~mine[1], mine[1] & ~mine[0]
        if all(bool(x.any()) for x in alone) and (
            maker.dim is None or bool((alone[0].any(maker.dim) & alone[1].any(maker.dim)).any())
        ):
            return maker.normal != "no" or _stay_apart(changed, before, int(both[n]), mine)
    return False


def _stay_apart(changed: tuple[_State, _State], before: Tensor, number: int, mine: list[Tensor]) -> bool:
    """True if what two places hold is multiplied by different weights whatever they hold: a feature that one draw of
    numbers switches off, as a ReLU does, comes on with another."""
    for seed in range(1, 5):
        mine = [
            one | _moved(before, state.again(seed).derivative(number)) for one, state in zip(mine, changed, strict=True)
        ]
    common = int((mine[0] & mine[1]).sum())
    return 2 * common <= min(int(x.sum()) for x in mine)


def _of_pairs(base: _State, one: _State, scored: Sequence[Tensor]) -> bool:
    """True if all weights that multiply what lies at one place depend on that place, some of them also on the other
    one, and some do not."""
    if scored[0].shape != base.weights.shape:
        return False
    factors = torch.randn(base.sums.shape, generator=torch.Generator().manual_seed(0)).to(base.sums)
    meets = _moved(base.mixture(factors), one.mixture(factors))
    here, there = (x[meets] for x in scored)
    return bool(here.all()) and bool(there.any()) and not bool(there.all())


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding."""
    change = (after - before).abs().nan_to_num(0.0, posinf=0.0)  # what a mask hides stays hidden
    return change > _SMALL * change.amax().clamp_min(torch.finfo(change.dtype).tiny)


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout != torch.strided else x


def _normalised(x: Tensor) -> int | None:
    """The dimension along which numbers sum to one; None if there is none."""
    if x.layout != torch.strided or not bool(x.isfinite().all()):
        return None
    rounding = 8 * torch.finfo(x.dtype).eps * max(x.shape, default=1)
    for dim in reversed(range(x.ndim)):
        if x.shape[dim] > 1 and bool(((x.sum(dim) - 1).abs() < max(rounding, 1e-6)).all()):
            return dim
    return None


def _is_smooth(operation: Operation) -> bool:
    """False of what chooses, whose choice stays as it was (a router sends a token where it did), and of what would cut
    the graph."""
    chooses = function_name(operation.function) in ("detach", "topk", "sort")
    return not chooses and any(x.is_floating_point() or x.is_complex() for x in tensors(operation.out))


def _mixes_heads(operation: Operation, maker: _Maker) -> bool:
    """True if a product with a parameter may have mixed the heads of a softmax's weights, as talking heads do."""
    out = operation.out
    return maker.name == "softmax" and isinstance(out, Tensor) and out.numel() == maker.weights.numel()


def _moves(operation: Operation) -> bool:
    """True if an operator only moves numbers, casts them, or takes a part of them."""
    return function_name(operation.function) in _MOVES
