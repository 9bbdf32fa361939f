"""Traces autograd's graph from a product of queries and keys back to the weights, and reads the operators on the
way."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from qkeel.capture.example import mapped, tensors
from qkeel.errors import RefusedError
from qkeel.patching.autograd import is_marked_norm, is_transposed, output_like, slice_of
from qkeel.patching.modes import (
    Args,
    Function,
    Kwargs,
    TorchOperator,
    function_name,
    no_operators_seen,
    without_others,
    writes,
    written_arguments,
)

# The operators of a recorded pass: what each of them read and wrote, and how to run some of them again with other
# values.
#
# A pass is recorded operator by operator as it runs, without any analysis. What an operator read and wrote is
# determined on request, and an index by memory leads from a tensor to the operators that use it. Tracing the weights of
# one layer therefore examines only the operators of that attention, however deep the model is.

_LOG = logging.getLogger(__name__)

# Where a tensor is stored: its memory, offset, sizes, strides and dtype. Two tensors at the same place are identical.
Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
Values = Mapping[Place, Tensor]
Contents = Mapping[int, Tensor]
Lookup = Callable[[Tensor], Tensor]

# Operators whose output depends on the shape and dtype of their input, but not on its values.
_FORM_ALONE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "convolution")


def place(x: Tensor) -> Place:
    """The location and layout of a tensor in memory. For a tensor without memory of its own (a subclass), the location
    is the id of the object."""
    try:
        return memory(x), int(x.storage_offset()), x.shape, x.stride(), x.dtype
    except (RuntimeError, NotImplementedError):
        return id(x), 0, x.shape, (), x.dtype


def memory(x: Tensor) -> int:
    """The address of a tensor's memory, the same for all views of one tensor."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(x)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)  # not frozen, because each layer has about a hundred
class Operation:
    """One operator that ran: its inputs, its output, and the memory that it read and wrote.

    `changed` holds the arguments that it modified, and `name` is its name without outer underscores and overload.
    """

    name: str
    function: Function
    args: Args
    kwargs: Kwargs
    out: object
    changed: tuple[Tensor, ...]
    reads: frozenset[int]
    writes: frozenset[int]

    @property
    def makes(self) -> frozenset[int]:
        """The memory of new outputs, which are neither views nor arguments that were written to."""
        return self.writes.difference(self.reads, map(memory, self.changed))


@final
class Record:
    """The operators of a pass, which keep all its tensors alive, with an index of the memory that each operator reads
    and writes."""

    def __init__(self, operators: Sequence[TorchOperator]) -> None:
        self._memory: dict[int, int] = {}  # keyed by the id of a tensor; all tensors are alive
        self._forms: dict[int, tuple[Hashable, list[Tensor]]] = {}
        self._known: dict[int, tuple[str, bool, bool]] = {}  # keyed by the operator's id, as hashing one needs a call
        self.operations = [self._operation(*operator) for operator in operators]
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._writers: dict[int, list[int]] = defaultdict(list)
        for i, operation in enumerate(self.operations):
            for m in operation.reads:
                self._readers[m].append(i)
            for m in operation.writes:
                self._writers[m].append(i)

    def _operation(self, function: Function, args: Args, kwargs: Kwargs, out: object) -> Operation:
        known = self._known.get(id(function))
        if known is None:
            name = function_name(function)
            form_alone = name in _FORM_ALONE or name.startswith("new_")
            known = self._known[id(function)] = name, form_alone, writes(function)
        name, form_alone, in_place = known
        changed = tuple(tensors(written_arguments(function, args, kwargs))) if in_place else ()
        reads, written = set[int](), set[int]()
        if not form_alone:
            self._add_memories(args, reads)
            if kwargs:
                self._add_memories(kwargs.values(), reads)
        self._add_memories((out, *changed), written)
        return Operation(
            name=name,
            function=function,
            args=args,
            kwargs=kwargs,
            out=out,
            changed=changed,
            reads=frozenset(reads),
            writes=frozenset(written),
        )

    def _add_memories(self, values: Iterable[object], found: set[int]) -> None:
        for x in values:  # this runs a hundred times for each layer, so there is no generator for each
            if isinstance(x, Tensor):
                found.add(self._memory.get(id(x)) or self._memory_of(x))
            elif isinstance(x, (tuple, list)):
                self._add_memories(x, found)
            elif isinstance(x, dict):
                self._add_memories(x.values(), found)

    def _memory_of(self, x: Tensor) -> int:
        """The memory of a tensor of the pass."""
        found = self._memory.get(id(x))
        return self._memory.setdefault(id(x), memory(x)) if found is None else found

    def tensors_of(self, number: int) -> list[Tensor]:
        """The tensors among the arguments and outputs of an operator, in a fixed order."""
        return self._form(number)[1]

    def _form(self, number: int) -> tuple[Hashable, list[Tensor]]:
        """What an operator was called with and what it returned, with markers in place of the tensors, and these
        tensors."""
        found = self._forms.get(number)
        if found is None:
            o, inside = self.operations[number], list[Tensor]()
            form = [_form_of(x, inside) for x in (*o.args, o.out)]
            if o.kwargs:
                form.append(_form_of(o.kwargs, inside))
            found = self._forms[number] = tuple(form), inside
        return found

    def alike(self, one: int, two: int, count: int) -> dict[int, int] | None:
        """Compares two sequences of `count` operators, which begin at the indices `one` and `two`.

        Returns: a mapping from the memory of the first sequence to that of the second, if the same operators ran on
            tensors of the same shapes and dtypes that were computed from each other in the same way; otherwise None.
        """
        there, back, done = dict[int, int](), dict[int, int](), dict[int, int]()
        known = self._memory  # of all tensors in both sequences
        for i in range(count):
            if self.operations[one + i].function is not self.operations[two + i].function:
                return None
            (form, mine), (other, its) = self._form(one + i), self._form(two + i)
            if form != other:
                return None
            for x, y in zip(mine, its, strict=True):
                if done.get(id(x)) == id(y):
                    continue
                done[id(x)] = id(y)
                m, n = known.get(id(x)) or self._memory_of(x), known.get(id(y)) or self._memory_of(y)
                if there.setdefault(m, n) != n or back.setdefault(n, m) != m or not _same_layout(x, y):
                    return None
        return there

    def reached(self, start: Iterable[int], since: int = 0, until: int | None = None) -> set[int]:
        """The memory whose contents depend on the given memory, through the operators from index `since` on."""
        if since or until is not None:
            return self._spread(start, since, until, lambda _operation, _found: True)
        found = set(start)  # for the model's input, which affects most of what the pass computes
        for operation in self.operations:
            if not found.isdisjoint(operation.reads):
                found |= operation.writes
        return found

    def weights_of(self, start: Iterable[int], known: set[int], dynamic: set[int]) -> set[int]:
        """The memory of weights that are computed from given weights, for example by a transpose or a parametrization.
        Products with activations (`dynamic`) or with other weights are excluded."""

        def is_weight(operation: Operation, found: set[int]) -> bool:
            product = operation.name in _PRODUCTS
            return dynamic.isdisjoint(operation.reads) and not (product and not operation.reads <= found | known)

        return self._spread(start, 0, None, is_weight)

    def _spread(
        self, start: Iterable[int], since: int, until: int | None, passes: Callable[[Operation, set[int]], bool]
    ) -> set[int]:
        """The given memory, and all memory written by operators that read some of it and for which `passes` is true, in
        order."""
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
        """The operators on which the contents of this memory depend, in order.

        Args:
            wanted: the memory whose origin is traced.
            until: the number of operators that had run when the memory was read.
            unread: returns the inputs of an operator that are not traced further.
            given: maps memory to the index of the operator from which on its contents are given; what computed them is
                left out.
            since: the index of the first operator that is considered.
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
        """The indices of the operators before index `until` that read any of this memory."""
        return sorted({i for m in wanted for i in self._readers.get(m, ()) if i < until})

    def maker(self, wanted: int, until: int) -> int:
        """The number of operators that had run when the tensor in this memory first existed."""
        numbers = (i for i in reversed(self._writers.get(wanted, [])) if i < until)
        return next((i for i in numbers if wanted in self.operations[i].makes), -1) + 1


_TENSOR = object()
_CONSTANTS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})  # most arguments


def _form_of(value: object, found: list[Tensor]) -> Hashable:
    """A value that is equal for arguments that differ only in their tensors, which are appended to `found`."""
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if isinstance(value, Tensor):
        found.append(value)
        return _TENSOR
    if isinstance(value, (tuple, list)):
        return tuple([_form_of(x, found) for x in value])
    if isinstance(value, Mapping):
        return tuple([(name, _form_of(x, found)) for name, x in value.items()])
    return kind, value if isinstance(value, Hashable) else id(value)


def _same_layout(x: Tensor, y: Tensor) -> bool:
    """True if two tensors have the same sizes, dtype and device, and the same strides and offset in their memory."""
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    try:
        return x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own
        return type(x) is type(y)


class Repetition:
    """Operators that can be run again with other values in some places. Operators whose result would not change are
    left out."""

    def __init__(self, operations: Sequence[Operation], changed: set[int]) -> None:
        """Takes the operators in order, and the memory whose contents will be different."""
        self.operations = _affected(operations, changed)

    @functools.cached_property
    def _steps(self) -> list[tuple[Function, list[Any], dict[str, Any], list[Place]]]:
        """The functions to call, their arguments with markers in place of the tensors, and the locations of their
        outputs."""
        # Another process may repeat different operators, or none, so waiting for it could take forever.
        functions = [without_others(o.function, o.args) or o.function for o in self.operations]
        return [
            (function, mapped([*o.args], _marked), mapped(dict(o.kwargs), _marked), _places(o.out))
            for function, o in zip(functions, self.operations)
        ]

    @functools.cached_property
    def _foreign(self) -> list[Tensor]:
        """The tensors that the operators write to but did not create."""
        made, found = set[int](), list[Tensor]()
        for operation in self.operations:
            made |= operation.makes
            found += [x for x in operation.changed if memory(x) not in made]
        return found

    def products(self, weights: set[int]) -> list[Operation]:
        """The operators that multiply the contents of this memory, in a matrix product or element by element."""
        return [o for o in self.operations if not weights.isdisjoint(o.reads) and o.makes]

    @torch.no_grad()
    def __call__(self, values: Values, contents: Contents | None = None) -> Lookup:
        """Runs the operators with other values in some places and other contents in some memory. Returns a function
        that maps a tensor of the recorded pass to its new value."""
        return self._repeated(values, contents)

    @torch.enable_grad()
    def with_graph(self, values: Values, contents: Contents | None = None) -> Lookup:
        """Runs the operators with gradients, so that the tensors found can be differentiated with respect to the given
        values."""
        return self._repeated(values, contents)

    def _repeated(self, values: Values, contents: Contents | None) -> Lookup:
        now = _Now(dict(values), dict(contents or {}))
        for x in self._foreign:
            now.copy(x)
        for function, args, kwargs, places in self._steps:
            given = [mapped(x, now.of) if type(x) in (list, tuple) else now.of(x) for x in args]
            now.put(places, function(*given, **mapped(kwargs, now.of)) if kwargs else function(*given))
        return now

    @torch.no_grad()
    def at_once(
        self, values: Values, wanted: Sequence[Tensor], contents: Contents | None = None
    ) -> list[Tensor] | None:
        """Returns the wanted tensors [n ...] for n sets of values [n ...] in the given places, or None if the operators
        cannot be run on a batch."""
        places = list(values)

        def run(*numbers: Tensor) -> tuple[Tensor, ...]:
            now = self(dict(zip(places, numbers)), contents)
            return tuple(now(x) for x in wanted)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about operators that torch runs one by one
                return list(torch.func.vmap(run)(*values.values()))
        except RefusedError:
            raise
        except Exception as error:
            _LOG.debug("operators are repeated for one change at a time: %s", error)
            return None


class _Now:
    """The values of a recorded pass's tensors in a repetition of the pass."""

    def __init__(self, values: dict[Place, Tensor], contents: dict[int, Tensor]) -> None:
        self._values, self._contents = values, contents

    def __call__(self, x: Tensor) -> Tensor:
        return self.of(_marked(x))

    def of(self, value: Any) -> Any:
        """The new value of a marked tensor; anything else is returned unchanged."""
        if type(value) is not _Mark:
            return value
        known = self._values.get(value.where)
        if known is not None:
            return known
        content = self._contents.get(value.lies_in)
        return value.x if content is None else at_place(value.x, content)

    def copy(self, x: Tensor) -> None:
        """Makes a copy of the contents of this tensor's memory and uses it from now on."""
        known = self._contents.get(memory(x))
        self._contents[memory(x)] = contents_of(x) if known is None else known.clone()

    def put(self, places: Sequence[Place], after: object) -> None:
        """Replaces one tensor by another, or several tensors by others."""
        for old, new in zip(places, tensors(after), strict=True):
            self._values[old] = new


def contents_of(x: Tensor) -> Tensor:
    """A copy of a tensor's entire underlying storage, as a 1-D tensor of the same dtype."""
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((n,), (1,), 0).clone()


def at_place(x: Tensor, content: Tensor) -> Tensor:
    """The tensor that has the same place in this content as x has in its own memory."""
    content = content if content.dtype == x.dtype else content.view(x.dtype)
    return content.as_strided(x.shape, x.stride(), x.storage_offset())


def stored(x: Tensor) -> Tensor:
    """A view of the stored elements of a tensor, without those that it repeats along a dimension, so that it can be
    changed in place."""
    for dim, step in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if step == 0 and x.shape[dim] > 1 else x
    return x


def _affected(operations: Sequence[Operation], changed: set[int]) -> list[Operation]:
    """The operators that read changed memory, and the operators that created what such an operator modifies in
    place."""
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


# The autograd graph between q (or k) and the input of its attention module, as far as weights are concerned.

# Nodes that compute activations times weights, with the indices of the inputs that are x, the weight and the bias.
_CONVOLUTION = "ConvolutionBackward0"
_MATRIX = {
    _CONVOLUTION: (0, 1, 2),
    "AddmmBackward0": (1, 2, 0),
    "MmBackward0": (0, 1, None),
    "LinearBackward0": (0, 1, 2),
    "BmmBackward0": (0, 1, None),
}
# Norms that are a single node. A batch norm in evaluation is not a norm, but the model has one as soon as it trains.
WHOLE_NORMS = frozenset(
    {
        *("NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0", "_ResizeBackward"),
        *("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
    }
)
NORMS = WHOLE_NORMS | {"RsqrtBackward0", "LinalgVectorNormBackward0", "NormBackward1", "NormBackward0"}
# Nodes beyond which there is no logit path, because the search has left the attention.
_ENDS = ("Softmax", "ScaledDotProduct", "Embedding", "Gelu", "CrossEntropy", "NllLoss")
_TURNS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "TransposeBackward1"})
_PARTS = ("Slice", "Split", "Select", "Narrow", "Unbind", "Index")
# Nodes that rearrange elements.
MOVES = (
    *("View", "UnsafeView", "ReshapeAlias", "AsStrided", "Alias", "Transpose", "Permute", "TBackward", "Slice"),
    *("Split", "Cat", "Stack", "Unbind", "Select", "Index", "Unsqueeze", "Squeeze", "Expand", "Clone", "ToCopy"),
    *("Neg", "Repeat", "Roll", "Flip", "Unfold"),
)
# Nodes that rearrange the elements of parameters, interpolate or add them, or multiply them by a constant.
_OF_PARAMETERS = (*MOVES, "Mul", "Div", "Embedding", "Gather", "Upsample", "AddBackward")
_LIMIT = 4000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BiasPart:
    """Entries of a parameter that are added to `size` features of a projection, starting at feature `first`; `shift` is
    the index of an entry minus the index of its feature."""

    parameter: str
    first: int
    size: int
    shift: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A product activations · weight in the graph: the node whose output holds the features, and the parameter that was
    multiplied.

    `size` rows (`axis` 0) or columns (`axis` 1) of the parameter produce its features, which are dimension `features`
    of the node's output; `order` says which row or column produces each feature, if they are not in order. `normed` is
    True if there is a norm between the projection and q or k. `above` holds the projections from which its input is
    computed. `shared` is True if all heads use all of it, as for a table of positions with one row for each feature.
    For a `table`, the node is the parameter itself, and its features are its entries.
    """

    node: Node
    parameter: str
    axis: int
    size: int
    biases: tuple[BiasPart, ...] = ()
    normed: bool = False
    above: tuple[Projection, ...] = ()
    shared: bool = False
    features: int = -1
    order: Tensor | None = None
    table: bool = False

    @property
    def convolves(self) -> bool:
        """True for a convolution."""
        return self.node.name() == _CONVOLUTION

    def by_feature(self, grad: Tensor) -> Tensor:
        """A gradient at the node, reshaped to [all other dimensions, features]."""
        if self.table:
            return grad.detach().flatten(1) if self.axis else grad.detach().flatten(1).mT
        return grad.detach().movedim(self.features, -1).flatten(0, -2)

    def reached(self, grad: Tensor | None) -> Tensor:
        """The indices of the rows or columns whose features a gradient reaches."""
        if grad is None:
            return torch.empty(0, dtype=torch.int64)
        return self.numbers(self.by_feature(grad).ne(0).any(0).cpu())

    def numbers(self, features: Bool[Tensor, " features"]) -> Tensor:
        """The indices of the rows or columns that produce these features."""
        found = features.nonzero().flatten()
        return found if self.order is None else self.order[found].unique()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """The result of tracing the graph back from q or k: the nearest projections, and the norm nodes in between.

    `opaque` holds the names of parameters that are a factor of a product on the path, but whose rows cannot be assigned
    to heads, because they are not matrices or because only a part of the matrix was used. `tables` holds the nodes of
    parameters that were concatenated with the outputs of the projections, such as learned keys that precede those of
    the tokens.
    """

    nearest: tuple[Projection, ...]
    mixers: tuple[Node, ...] = ()
    opaque: tuple[str, ...] = ()
    tables: tuple[Node, ...] = ()


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of parameters by identity; a tied parameter has its first name."""
    return {id(p): name for name, p in model.named_parameters()}


def nodes_of(inputs: Iterable[Tensor]) -> set[Node]:
    """The graph nodes that computed these tensors, which are the nodes where tracing stops."""
    return {x.grad_fn for x in inputs if x.grad_fn is not None}


def leaves_of(start: Node, stops: set[Node]) -> list[Node] | None:
    """The parameters' nodes behind a node that is computed only from parameters, by views, indices, sums and constant
    factors. None for any other node, or if `stops` are reached."""
    seen: set[Node] = set()
    queue, found = [start], []
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in stops or len(seen) > 40:
            return None
        if variable_of(node) is not None:
            found.append(node)
        elif not node.name().startswith(_OF_PARAMETERS):
            return None
        queue += [n for n, _ in node.next_functions if n is not None]
    return found


def walk(start: Node, stops: set[Node], names: dict[int, str], depth: int = 3) -> Walk:
    """The projections nearest to `start`, each with the projections above it, without going beyond `stops`."""
    found: dict[Node, Projection] = {}
    mixers: list[Node] = []
    opaque: list[str] = []
    tables: list[Node] = []
    seen: set[tuple[Node, bool]] = set()
    queue: list[tuple[Node, bool, tuple[BiasPart, ...]]] = [(start, False, ())]
    while queue and len(seen) < _LIMIT:
        node, normed, added = queue.pop(0)
        if (node, normed) in seen or node in stops or node.name().startswith(_ENDS):
            continue
        seen.add((node, normed))
        projection = _projection(node, names, normed, stops, depth)
        if projection is not None:
            if node not in found or (normed and not found[node].normed):
                found[node] = dataclasses.replace(projection, biases=projection.biases or added)
            continue
        opaque += _opaque(node, stops, names)
        tables += _concatenated(node, stops, names)
        norm = node.name() in NORMS or is_marked_norm(node)
        normed = normed or norm
        # A term that is added after a norm is the bias of the norm, not of the projection.
        added = () if norm else _added(node, names) or added
        if _mixes(node):
            mixers.append(node)
        queue += [(n, normed, added) for n, _ in node.next_functions if n is not None]
    around = [node for node in dict.fromkeys(mixers) if node.name() in NORMS or _is_beside(node, start, stops, found)]
    return Walk(
        nearest=tuple(found.values()),
        mixers=tuple(around),
        opaque=tuple(dict.fromkeys(opaque)),
        tables=tuple(dict.fromkeys(tables)),
    )


def _opaque(node: Node, stops: set[Node], names: dict[int, str]) -> list[str]:
    """The parameters in a product that belong to no projection, because one of the factors is computed only from
    them."""
    places = () if node.name() == _CONVOLUTION else _MATRIX.get(node.name(), ())
    for factor in (node.next_functions[place][0] for place in places[:2]):
        leaves = None if factor is None else leaves_of(factor, stops)
        found = [names.get(id(variable_of(leaf)), "") for leaf in leaves or ()]
        if leaves and all(found):
            return found
    return []


def _concatenated(node: Node, stops: set[Node], names: dict[int, str]) -> list[Node]:
    """The nodes of tables that a concatenation joins with other tensors."""
    found: list[Node] = []
    for part, _ in node.next_functions if node.name() == "CatBackward0" else ():
        leaves = None if part is None else leaves_of(part, stops)
        if leaves is not None and len(leaves) == 1 and _is_table(variable_of(leaves[0]), names):
            found.append(leaves[0])
    return found


def _is_table(variable: Tensor, names: dict[int, str]) -> bool:
    return id(variable) in names and variable.ndim > 1


def _mixes(node: Node) -> bool:
    name = node.name()
    return name in NORMS or name.startswith(("MeanBackward", "VarBackward", "StdBackward", "SumBackward"))


def _is_beside(node: Node, start: Node, stops: set[Node], projections: Collection[Node]) -> bool:
    """True if every projection behind a sum or mean can also be reached without it, as when x is divided by a norm that
    is written out. A sum through which all of x passes does not belong to a norm; it is, for example, a rotation by 2 ×
    2 matrices or pooling."""
    return _reached(node, None, stops, projections) <= _reached(start, node, stops, projections)


def _reached(start: Node, without: Node | None, stops: set[Node], projections: Collection[Node]) -> set[Node]:
    """The projections that are reached from a node without passing through another node."""
    seen: set[Node] = set()
    queue = [start]
    while queue:
        node = queue.pop()
        if node is without or node in seen or node in stops or node.name().startswith(_ENDS):
            continue
        seen.add(node)
        if node not in projections:
            queue += [n for n, _ in node.next_functions if n is not None]
    return seen.intersection(projections)


def _projection(node: Node, names: dict[int, str], normed: bool, stops: set[Node], depth: int) -> Projection | None:
    places = _MATRIX.get(node.name())
    if places is None:
        return None
    x, w, b = places
    weight = _weight(node.next_functions[w][0], names)
    if weight is None:
        return None
    name, turned, variable = weight
    places = _joined_places(node, turned, variable)
    if places is None:
        return None
    after = node.next_functions[x][0]
    above: tuple[Projection, ...] = ()
    if depth > 1 and after is not None:
        # A norm ends the path, because the weights before it do not scale the logit.
        above = tuple(p for p in walk(after, stops, names, depth - 1).nearest if not p.normed)
    biases = () if b is None or b >= len(node.next_functions) else _biases(node.next_functions[b][0], names)
    axis, order = places
    return Projection(
        node=node,
        parameter=name,
        axis=axis,
        size=variable.flatten(1).shape[axis],
        biases=biases,
        normed=normed,
        above=above,
        features=1 if node.name() == _CONVOLUTION else -1,
        order=order,
    )


def _joined_places(node: Node, turned: bool, variable: Tensor) -> tuple[int, Tensor | None] | None:
    """The axis of a weight along which the features are produced, and their order. None if the features do not
    correspond to rows or columns of the weight."""
    name = node.name()
    if name == _CONVOLUTION:
        return None if variable.ndim < 3 or is_transposed(node) else (0, None)
    if variable.ndim == 2:
        if name == "BmmBackward0":
            turned = _makes_rows(node, variable)  # an einsum may permute its operands in any way
        return (0 if name == "LinearBackward0" or turned else 1), None
    return _order(node, variable) if variable.ndim == 3 else None


def _order(node: Node, weight: Tensor) -> tuple[int, Tensor] | None:
    """The axis and order of the features for a weight of three dimensions, [m h d] or [h m d]. Each feature gets a
    number, and one gradient for each bit of these numbers shows which entries produce the feature."""
    out = output_like(node)
    if out.ndim > 2 and out.shape[:-2].numel() > 1:
        return None
    numbers = torch.arange(1, out.shape[-1] + 1, device=out.device)
    codes = torch.zeros(weight.shape, dtype=torch.int64, device=out.device)
    for bit in range(len(numbers).bit_length()):
        own = ((numbers >> bit) & 1).to(out).expand_as(out)
        with no_operators_seen():
            (grad,) = torch.autograd.grad(GradientEdge(node, 0), weight, own, retain_graph=True)
        codes |= grad.ne(0).long() << bit
    columns = codes.flatten(1).amax(0)
    empty = codes == 0  # entries whose other factor is zero for all tokens
    if torch.equal(columns.sort().values, numbers) and bool((empty.flatten(1) | (codes.flatten(1) == columns)).all()):
        return 1, columns.argsort().cpu()
    rows = torch.arange(len(weight), device=out.device).view(-1, 1, 1).expand_as(codes)
    makers = rows.new_full((1 << len(numbers).bit_length(),), -1).index_put((codes,), rows)
    alone = bool((empty | (makers[codes] == rows)).all())
    makers = makers[1 : len(numbers) + 1].cpu()
    return (0, makers) if alone and bool((makers >= 0).all()) else None


def variable_of(node: Node) -> Any:
    """The leaf tensor whose gradient a node accumulates, or None for any other node."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]


def _biases(node: Node | None, names: dict[int, str]) -> tuple[BiasPart, ...]:
    """The entries of a bias vector, which may be a full parameter, a slice of one, or several joined (BEiT's q_bias, 0,
    v_bias)."""
    if node is None:
        return ()
    variable = variable_of(node)
    if variable is not None:
        name = names.get(id(variable))
        return () if name is None or variable.ndim != 1 else (BiasPart(parameter=name, first=0, size=len(variable)),)
    inputs = [n for n, _ in node.next_functions]
    if node.name() == "SliceBackward0":
        whole = _biases(inputs[0], names)
        if len(whole) != 1 or inputs[0] is None or inputs[0].name() == "CatBackward0":
            return ()
        start, end, step = slice_of(node).indices(whole[0].size)
        return (dataclasses.replace(whole[0], size=end - start, shift=whole[0].shift + start),) if step == 1 else ()
    found: list[BiasPart] = []
    for part in inputs if node.name() == "CatBackward0" else ():
        own = _biases(part, names)
        if len(own) != 1:
            break  # the length of a part that is not a parameter is unknown
        first = sum(p.size for p in found)
        found.append(dataclasses.replace(own[0], first=first, shift=own[0].shift - first))
    return tuple(found)


def _added(node: Node, names: dict[int, str]) -> tuple[BiasPart, ...]:
    """The bias that an addition adds to a product."""
    if node.name() != "AddBackward0" or len(node.next_functions) != 2:
        return ()
    biases = [found for n, _ in node.next_functions if (found := _biases(n, names))]
    return biases[0] if len(biases) == 1 else ()


def _makes_rows(node: Node, weight: Tensor) -> bool:
    """True if a row of a matrix produces a feature of the product, False if a column does; determined by one
    gradient."""
    first = output_like(node)
    first[..., 0] = 1.0
    with no_operators_seen():
        (grad,) = torch.autograd.grad(GradientEdge(node, 0), weight, first, retain_graph=True)
    return int(grad.ne(0).any(1).sum()) <= int(grad.ne(0).any(0).sum())


def _weight(node: Node | None, names: dict[int, str]) -> tuple[str, bool, Tensor] | None:
    """The name of the parameter behind a weight, whether it was transposed on the way, and the parameter itself. The
    operations of a parametrization in between are traced through, if they lead only to parameters."""
    if node is None:
        return None
    turned = {node: False}
    queue, found = [node], []
    while queue:
        at = queue.pop(0)
        variable = variable_of(at)
        if variable is not None:
            if id(variable) not in names:
                return None
            if variable.ndim > 1 and len(variable) > 1 and variable[0].numel() > 1:
                found.append((names[id(variable)], turned[at], variable))
            continue
        # This is a slice of a larger matrix, whose rows are not those of the parameter.
        if at.name() in _MATRIX or at.name().startswith(_PARTS) or len(turned) > 40:
            return None
        for n, _ in at.next_functions:
            if n is not None and n not in turned:
                turned[n] = turned[at] ^ (at.name() in _TURNS)
                queue.append(n)
    return found[0] if len(found) == 1 else None
