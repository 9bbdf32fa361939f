"""The walk through autograd's graph from a product of queries and keys to the weights, and the operators it knows."""

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
# numbers.
#
# A pass is recorded as it runs, operator by operator, and nothing is looked at then. What an operator read and wrote
# is worked out when somebody asks, and an index by memory leads from a tensor to the operators that touch it. So
# whoever follows one layer's weights looks at the operators of that attention, however deep the model is.

_LOG = logging.getLogger(__name__)

# Where a tensor lies: its memory, offset, sizes, strides and number format. Two tensors at one place are the same.
Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
Values = Mapping[Place, Tensor]
Contents = Mapping[int, Tensor]
Lookup = Callable[[Tensor], Tensor]

# Their output depends on the form of what they are given, not on its numbers.
_FORM_ALONE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "convolution")


def place(x: Tensor) -> Place:
    """The place of a tensor in memory; for a tensor without memory of its own (a subclass), that of the object."""
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


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)  # not frozen: there are a hundred of a layer
class Operation:
    """One operator that ran: its inputs, its output, and the memory that it read and wrote.

    `changed` are the arguments that it modified, `name` its name without outer underscores and overload.
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
        """The memory of new outputs: neither views nor arguments that were written into."""
        return self.writes.difference(self.reads, map(memory, self.changed))


@final
class Record:
    """The operators of a pass, which keep all its tensors alive, with an index of which operator reads and writes which
    memory."""

    def __init__(self, operators: Sequence[TorchOperator]) -> None:
        self._memory: dict[int, int] = {}  # of a tensor, by its id: all of them are alive
        self._forms: dict[int, tuple[Hashable, list[Tensor]]] = {}
        self._known: dict[int, tuple[str, bool, bool]] = {}  # of each operator that ran, as to hash one takes a call
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
        for x in values:  # a hundred times for each layer: without a generator for each
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
        """What an operator was called with and put out, with marks in the place of tensors, and these tensors."""
        found = self._forms.get(number)
        if found is None:
            o, inside = self.operations[number], list[Tensor]()
            form = [_form_of(x, inside) for x in (*o.args, o.out)]
            if o.kwargs:
                form.append(_form_of(o.kwargs, inside))
            found = self._forms[number] = tuple(form), inside
        return found

    def alike(self, one: int, two: int, count: int) -> dict[int, int] | None:
        """Compares two runs of `count` operators, from numbers `one` and `two` on.

        Returns: the memory of the second run by that of the first, if the same operators ran on tensors of the same
            form, which were made of each other in the same way; else None.
        """
        there, back, done = dict[int, int](), dict[int, int](), dict[int, int]()
        known = self._memory  # of all tensors here
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
        """The memory whose numbers depend on given memory, by the operators from number `since` on."""
        if since or until is not None:
            return self._spread(start, since, until, lambda _operation, _found: True)
        found = set(start)  # of the model's input: most of what the pass computes
        for operation in self.operations:
            if not found.isdisjoint(operation.reads):
                found |= operation.writes
        return found

    def weights_of(self, start: Iterable[int], known: set[int], dynamic: set[int]) -> set[int]:
        """The memory of weights computed from given weights, as by a transpose or a parametrization; products with
        activations (`dynamic`) or with other weights are excluded."""

        def is_weight(operation: Operation, found: set[int]) -> bool:
            product = operation.name in _PRODUCTS
            return dynamic.isdisjoint(operation.reads) and not (product and not operation.reads <= found | known)

        return self._spread(start, 0, None, is_weight)

    def _spread(
        self, start: Iterable[int], since: int, until: int | None, passes: Callable[[Operation, set[int]], bool]
    ) -> set[int]:
        """The given memory, and what operators write that read some of it and for which `passes` is true, in order."""
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
        """The operators that the numbers in this memory come from, in order.

        Args:
            wanted: the memory.
            until: how many operators had run when it was read.
            unread: which inputs of an operator are not followed further.
            given: memory whose numbers exist from the operator of this number on; what made them is left out.
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
        """The number of operators that had run when the tensor in this memory first existed."""
        numbers = (i for i in reversed(self._writers.get(wanted, [])) if i < until)
        return next((i for i in numbers if wanted in self.operations[i].makes), -1) + 1


_TENSOR = object()
_CONSTANTS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})  # most arguments


def _form_of(value: object, found: list[Tensor]) -> Hashable:
    """A value that is equal for arguments which differ in their tensors alone; collects these."""
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
    """True if two tensors have the same sizes and number format, and lie in their memory alike."""
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    try:
        return x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
    except (RuntimeError, NotImplementedError):  # without memory of their own
        return type(x) is type(y)


class Repetition:
    """Operators that can be run again with other numbers in some places; those whose result would not change are left
    out."""

    def __init__(self, operations: Sequence[Operation], changed: set[int]) -> None:
        """Takes the operators in their order, and the memory whose numbers will be others."""
        self.operations = _affected(operations, changed)

    @functools.cached_property
    def _steps(self) -> list[tuple[Function, list[Any], dict[str, Any], list[Place]]]:
        """The functions to call, their arguments with marks in the place of tensors, and the places of their
        outputs."""
        # Another process may repeat other operators, or none: waiting for it could last for ever.
        functions = [without_others(o.function, o.args) or o.function for o in self.operations]
        return [
            (function, mapped([*o.args], _marked), mapped(dict(o.kwargs), _marked), _places(o.out))
            for function, o in zip(functions, self.operations)
        ]

    @functools.cached_property
    def _foreign(self) -> list[Tensor]:
        """The tensors that the operators write into but did not make."""
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
        """Runs the operators with other numbers in some places and other contents of some memory. Returns a function
        that maps a tensor of the recorded pass to its new value."""
        return self._repeated(values, contents)

    @torch.enable_grad()
    def with_graph(self, values: Values, contents: Contents | None = None) -> Lookup:
        """Runs the operators with gradients, from the given numbers to the tensors found."""
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
        """Returns the wanted tensors [n ...] for n sets of numbers [n ...] in the given places; None if the operators
        can't be run on a batch."""
        places = list(values)

        def run(*numbers: Tensor) -> tuple[Tensor, ...]:
            now = self(dict(zip(places, numbers)), contents)
            return tuple(now(x) for x in wanted)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operators that torch runs one by one
                return list(torch.func.vmap(run)(*values.values()))
        except RefusedError:
            raise
        except Exception as error:
            _LOG.debug("operators are repeated for one change at a time: %s", error)
            return None


class _Now:
    """The tensors of a recorded pass as they are in a repetition of it."""

    def __init__(self, values: dict[Place, Tensor], contents: dict[int, Tensor]) -> None:
        self._values, self._contents = values, contents

    def __call__(self, x: Tensor) -> Tensor:
        return self.of(_marked(x))

    def of(self, value: Any) -> Any:
        """The new value of a marked tensor; anything else as it is."""
        if type(value) is not _Mark:
            return value
        known = self._values.get(value.where)
        if known is not None:
            return known
        content = self._contents.get(value.lies_in)
        return value.x if content is None else at_place(value.x, content)

    def copy(self, x: Tensor) -> None:
        """From now on, a copy stands in for what lies in this tensor's memory."""
        known = self._contents.get(memory(x))
        self._contents[memory(x)] = contents_of(x) if known is None else known.clone()

    def put(self, places: Sequence[Place], after: object) -> None:
        """Puts one tensor in the place of another, or several in the places of others."""
        for old, new in zip(places, tensors(after), strict=True):
            self._values[old] = new


def contents_of(x: Tensor) -> Tensor:
    """A copy of everything that lies in a tensor's memory, as a row of numbers of its dtype."""
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((n,), (1,), 0).clone()


def at_place(x: Tensor, content: Tensor) -> Tensor:
    """The tensor in this content that corresponds to x in its own memory."""
    content = content if content.dtype == x.dtype else content.view(x.dtype)
    return content.as_strided(x.shape, x.stride(), x.storage_offset())


def stored(x: Tensor) -> Tensor:
    """The numbers of a tensor, once where it repeats them along a dimension, so that they can be changed in place."""
    for dim, step in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if step == 0 and x.shape[dim] > 1 else x
    return x


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


# The autograd graph between q (or k) and the input of its attention module, as far as weights are concerned.

# What computes activations times weights: which of its inputs is x, the weight, the bias.
_CONVOLUTION = "ConvolutionBackward0"
_MATRIX = {
    _CONVOLUTION: (0, 1, 2),
    "AddmmBackward0": (1, 2, 0),
    "MmBackward0": (0, 1, None),
    "LinearBackward0": (0, 1, 2),
    "BmmBackward0": (0, 1, None),
}
# Norms in one node. A batch norm in evaluation is none, but the model is one with a norm as soon as it trains.
WHOLE_NORMS = frozenset(
    {
        *("NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0", "_ResizeBackward"),
        *("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
    }
)
NORMS = WHOLE_NORMS | {"RsqrtBackward0", "LinalgVectorNormBackward0", "NormBackward1", "NormBackward0"}
# Nodes behind which there is no logit path any more: the walk came out of the attention.
_ENDS = ("Softmax", "ScaledDotProduct", "Embedding", "Gelu", "CrossEntropy", "NllLoss")
_TURNS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "TransposeBackward1"})
_PARTS = ("Slice", "Split", "Select", "Narrow", "Unbind", "Index")
# What moves numbers about.
MOVES = (
    *("View", "UnsafeView", "ReshapeAlias", "AsStrided", "Alias", "Transpose", "Permute", "TBackward", "Slice"),
    *("Split", "Cat", "Stack", "Unbind", "Select", "Index", "Unsqueeze", "Squeeze", "Expand", "Clone", "ToCopy"),
    *("Neg", "Repeat", "Roll", "Flip", "Unfold"),
)
# What does so with the numbers of parameters, interpolates or adds them, or multiplies them by a constant.
_OF_PARAMETERS = (*MOVES, "Mul", "Div", "Embedding", "Gather", "Upsample", "AddBackward")
_LIMIT = 4000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BiasPart:
    """Entries of a parameter that are added to `size` features of a projection, from feature `first` on; `shift` is the
    number of an entry minus that of its feature."""

    parameter: str
    first: int
    size: int
    shift: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A product activations · weight in the graph: the node whose output holds the features, and what made it.

    `size` rows (`axis` 0) or columns (1) of the parameter make its features, which are dimension `features` of the
    node's output; `order` says which of them makes each feature, if they are not in order.
    `normed`: a norm lies between it and q or k. `above` are the projections that make its input. `shared`: all heads
    use all of it, as with a table of positions with a row for each feature. For a `table` the node is the parameter
    itself, and its features are its entries.
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
        """A gradient at the node as [all others, features]."""
        if self.table:
            return grad.detach().flatten(1) if self.axis else grad.detach().flatten(1).mT
        return grad.detach().movedim(self.features, -1).flatten(0, -2)

    def reached(self, grad: Tensor | None) -> Tensor:
        """The numbers of the rows or columns whose features a gradient reaches."""
        if grad is None:
            return torch.empty(0, dtype=torch.int64)
        return self.numbers(self.by_feature(grad).ne(0).any(0).cpu())

    def numbers(self, features: Bool[Tensor, " features"]) -> Tensor:
        """The numbers of the rows or columns that make these features."""
        found = features.nonzero().flatten()
        return found if self.order is None else self.order[found].unique()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """The result of a walk from q or k: the nearest projections, and the norm nodes in between.

    `opaque` are the names of parameters that something was multiplied by on the way, and whose rows cannot be assigned
    to heads: they are not matrices, or only a part of one was used. `tables` are the nodes of parameters that were put
    next to what the projections made, as learned keys before those of the tokens.
    """

    nearest: tuple[Projection, ...]
    mixers: tuple[Node, ...] = ()
    opaque: tuple[str, ...] = ()
    tables: tuple[Node, ...] = ()


def names_of(model: nn.Module) -> dict[int, str]:
    """Parameter names by identity; a tied one has its first name."""
    return {id(p): name for name, p in model.named_parameters()}


def nodes_of(inputs: Iterable[Tensor]) -> set[Node]:
    """The graph nodes that made these tensors: where a walk stops."""
    return {x.grad_fn for x in inputs if x.grad_fn is not None}


def leaves_of(start: Node, stops: set[Node]) -> list[Node] | None:
    """The parameters' nodes behind one that was made of parameters alone by views, indices, sums and constant factors;
    None for any other, or if `stops` are among them."""
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
    """The projections nearest to `start`, each with those above it; nothing beyond `stops`."""
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
        # What is added after a norm is the norm's bias, not the projection's.
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
    """The parameters of a product that are no projection's: one of its factors is made of them alone."""
    places = () if node.name() == _CONVOLUTION else _MATRIX.get(node.name(), ())
    for factor in (node.next_functions[place][0] for place in places[:2]):
        leaves = None if factor is None else leaves_of(factor, stops)
        found = [names.get(id(variable_of(leaf)), "") for leaf in leaves or ()]
        if leaves and all(found):
            return found
    return []


def _concatenated(node: Node, stops: set[Node], names: dict[int, str]) -> list[Node]:
    """The nodes of tables that a concatenation puts next to something else."""
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
    """True if every projection behind a sum or mean is reached without it too, as where x is divided by a norm that is
    written out. A sum that all of x passes through is not a norm's: a rotation by 2 × 2 matrices, or pooling."""
    return _reached(node, None, stops, projections) <= _reached(start, node, stops, projections)


def _reached(start: Node, without: Node | None, stops: set[Node], projections: Collection[Node]) -> set[Node]:
    """The projections that are reached from a node, not passing another one."""
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
        # A norm cuts the path: what lies before it does not scale the logit.
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
    """The axis of a weight along which features are made, and their order; None where features are no rows of it."""
    name = node.name()
    if name == _CONVOLUTION:
        return None if variable.ndim < 3 or is_transposed(node) else (0, None)
    if variable.ndim == 2:
        if name == "BmmBackward0":
            turned = _makes_rows(node, variable)  # an einsum permutes what it multiplies in ways of its own
        return (0 if name == "LinearBackward0" or turned else 1), None
    return _order(node, variable) if variable.ndim == 3 else None


def _order(node: Node, weight: Tensor) -> tuple[int, Tensor] | None:
    """The axis and order of the features of a weight of three dimensions, [m h d] or [h m d]: each feature gets a
    number, and one gradient for each bit of these numbers shows which entries make it."""
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
    empty = codes == 0  # what it multiplies is zero for all tokens
    if torch.equal(columns.sort().values, numbers) and bool((empty.flatten(1) | (codes.flatten(1) == columns)).all()):
        return 1, columns.argsort().cpu()
    rows = torch.arange(len(weight), device=out.device).view(-1, 1, 1).expand_as(codes)
    makers = rows.new_full((1 << len(numbers).bit_length(),), -1).index_put((codes,), rows)
    alone = bool((empty | (makers[codes] == rows)).all())
    makers = makers[1 : len(numbers) + 1].cpu()
    return (0, makers) if alone and bool((makers >= 0).all()) else None


def variable_of(node: Node) -> Any:
    """The leaf tensor whose gradient a node collects; None for any other node."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]


def _biases(node: Node | None, names: dict[int, str]) -> tuple[BiasPart, ...]:
    """A vector of parameters, as it is, a slice of one, or several one after the other (BEiT's q_bias, 0, v_bias)."""
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
            break  # what is no parameter does not say how long it is
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
    """True if a feature of a product is made by a row of a matrix, False if by a column: by one gradient."""
    first = output_like(node)
    first[..., 0] = 1.0
    with no_operators_seen():
        (grad,) = torch.autograd.grad(GradientEdge(node, 0), weight, first, retain_graph=True)
    return int(grad.ne(0).any(1).sum()) <= int(grad.ne(0).any(0).sum())


def _weight(node: Node | None, names: dict[int, str]) -> tuple[str, bool, Tensor] | None:
    """The name of the parameter behind a weight, whether it was transposed since, and itself. What a parametrization
    does in between is walked through, if it ends in parameters only."""
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
        # A slice of a larger matrix: its rows are not those of the parameter.
        if at.name() in _MATRIX or at.name().startswith(_PARTS) or len(turned) > 40:
            return None
        for n, _ in at.next_functions:
            if n is not None and n not in turned:
                turned[n] = turned[at] ^ (at.name() in _TURNS)
                queue.append(n)
    return found[0] if len(found) == 1 else None
