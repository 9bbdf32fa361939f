"""Traces autograd's graph from a product of queries and keys back to the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from qkeel.patching.autograd import is_marked_norm, is_transposed, output_like, slice_of

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
        *(
            "NativeLayerNormBackward0",
            "FusedRmsNormBackward0",
            "NativeGroupNormBackward0",
            "_ResizeBackward",
        ),
        *(
            "NativeBatchNormBackward0",
            "CudnnBatchNormBackward0",
            "MiopenBatchNormBackward0",
        ),
    }
)
NORMS = WHOLE_NORMS | {
    "RsqrtBackward0",
    "LinalgVectorNormBackward0",
    "NormBackward1",
    "NormBackward0",
}
# Nodes beyond which there is no logit path, because the search has left the attention.
_ENDS = ("Softmax", "ScaledDotProduct", "Embedding", "Gelu", "CrossEntropy", "NllLoss")
_TURNS = frozenset(
    {"TBackward0", "TransposeBackward0", "PermuteBackward0", "TransposeBackward1"}
)
_PARTS = ("Slice", "Split", "Select", "Narrow", "Unbind", "Index")
# Nodes that rearrange elements.
MOVES = (
    *(
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "AsStrided",
        "Alias",
        "Transpose",
        "Permute",
        "TBackward",
        "Slice",
    ),
    *(
        "Split",
        "Cat",
        "Stack",
        "Unbind",
        "Select",
        "Index",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Clone",
        "ToCopy",
    ),
    *("Neg", "Repeat", "Roll", "Flip", "Unfold"),
)
# Nodes that rearrange the elements of parameters, interpolate or add them, or multiply them by a constant.
_OF_PARAMETERS = (
    *MOVES,
    "Mul",
    "Div",
    "Embedding",
    "Gather",
    "Upsample",
    "AddBackward",
)
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
            return (
                grad.detach().flatten(1) if self.axis else grad.detach().flatten(1).mT
            )
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


def projected_inputs(starts: Iterable[Node], stops: set[Node]) -> set[Node]:
    """The nodes among `stops` that are reached from q and k through a product with a weight."""
    reached: set[Node] = set()
    known: set[tuple[Node, bool]] = set()
    queue = [(node, False) for node in starts]
    while queue:
        node, projected = queue.pop()
        if (node, projected) in known:
            continue
        known.add((node, projected))
        if node in stops:
            reached |= {node} if projected else set()
            continue
        factors = _MATRIX.get(node.name(), ())[:2]
        weights = [
            n
            for i in factors
            if (n := node.next_functions[i][0]) is not None and leaves_of(n, stops)
        ]
        projected = projected or bool(weights)
        queue += [(n, projected) for n, _ in node.next_functions if n is not None]
    return reached


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
                found[node] = dataclasses.replace(
                    projection, biases=projection.biases or added
                )
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
    around = [
        node
        for node in dict.fromkeys(mixers)
        if node.name() in NORMS or _is_beside(node, start, stops, found)
    ]
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
        if (
            leaves is not None
            and len(leaves) == 1
            and _is_table(variable_of(leaves[0]), names)
        ):
            found.append(leaves[0])
    return found


def _is_table(variable: Tensor, names: dict[int, str]) -> bool:
    return id(variable) in names and variable.ndim > 1


def _mixes(node: Node) -> bool:
    name = node.name()
    return name in NORMS or name.startswith(
        ("MeanBackward", "VarBackward", "StdBackward", "SumBackward")
    )


def _is_beside(
    node: Node, start: Node, stops: set[Node], projections: Collection[Node]
) -> bool:
    """True if every projection behind a sum or mean can also be reached without it, as when x is divided by a norm that
    is written out. A sum through which all of x passes does not belong to a norm; it is, for example, a rotation by 2 ×
    2 matrices or pooling."""
    return _reached(node, None, stops, projections) <= _reached(
        start, node, stops, projections
    )


def _reached(
    start: Node, without: Node | None, stops: set[Node], projections: Collection[Node]
) -> set[Node]:
    """The projections that are reached from a node without passing through another node."""
    seen: set[Node] = set()
    queue = [start]
    while queue:
        node = queue.pop()
        if (
            node is without
            or node in seen
            or node in stops
            or node.name().startswith(_ENDS)
        ):
            continue
        seen.add(node)
        if node not in projections:
            queue += [n for n, _ in node.next_functions if n is not None]
    return seen.intersection(projections)


def _projection(
    node: Node, names: dict[int, str], normed: bool, stops: set[Node], depth: int
) -> Projection | None:
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
        above = tuple(
            p for p in walk(after, stops, names, depth - 1).nearest if not p.normed
        )
    biases = (
        ()
        if b is None or b >= len(node.next_functions)
        else _biases(node.next_functions[b][0], names)
    )
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


def _joined_places(
    node: Node, turned: bool, variable: Tensor
) -> tuple[int, Tensor | None] | None:
    """The axis of a weight along which the features are produced, and their order. None if the features do not
    correspond to rows or columns of the weight."""
    name = node.name()
    if name == _CONVOLUTION:
        return None if variable.ndim < 3 or is_transposed(node) else (0, None)
    if variable.ndim == 2:
        if name == "BmmBackward0":
            turned = _makes_rows(
                node, variable
            )  # an einsum may permute its operands in any way
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
        (grad,) = torch.autograd.grad(
            GradientEdge(node, 0), weight, own, retain_graph=True
        )
        codes |= grad.ne(0).long() << bit
    columns = codes.flatten(1).amax(0)
    empty = codes == 0  # entries whose other factor is zero for all tokens
    if torch.equal(columns.sort().values, numbers) and bool(
        (empty.flatten(1) | (codes.flatten(1) == columns)).all()
    ):
        return 1, columns.argsort().cpu()
    rows = torch.arange(len(weight), device=out.device).view(-1, 1, 1).expand_as(codes)
    makers = rows.new_full((1 << len(numbers).bit_length(),), -1).index_put(
        (codes,), rows
    )
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
        return (
            ()
            if name is None or variable.ndim != 1
            else (BiasPart(parameter=name, first=0, size=len(variable)),)
        )
    inputs = [n for n, _ in node.next_functions]
    if node.name() == "SliceBackward0":
        whole = _biases(inputs[0], names)
        if len(whole) != 1 or inputs[0] is None or inputs[0].name() == "CatBackward0":
            return ()
        start, end, step = slice_of(node).indices(whole[0].size)
        return (
            (
                dataclasses.replace(
                    whole[0], size=end - start, shift=whole[0].shift + start
                ),
            )
            if step == 1
            else ()
        )
    found: list[BiasPart] = []
    for part in inputs if node.name() == "CatBackward0" else ():
        own = _biases(part, names)
        if len(own) != 1:
            break  # the length of a part that is not a parameter is unknown
        first = sum(p.size for p in found)
        found.append(
            dataclasses.replace(own[0], first=first, shift=own[0].shift - first)
        )
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
    (grad,) = torch.autograd.grad(
        GradientEdge(node, 0), weight, first, retain_graph=True
    )
    return int(grad.ne(0).any(1).sum()) <= int(grad.ne(0).any(0).sum())


def _weight(
    node: Node | None, names: dict[int, str]
) -> tuple[str, bool, Tensor] | None:
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
