"""Traces autograd's graph from a query or key back to the weights that it is computed from."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from qkeel.patching.autograd import (
    inputs_of,
    is_transposed,
    output_like,
    variable_of,
)
from qkeel.patching.module_tables import parameters_of

# Nodes that compute activations times weights, with the indices of the inputs that are
# the activations, the weight and the bias.
_CONVOLUTION = "ConvolutionBackward0"
_MATRIX = {
    _CONVOLUTION: (0, 1, 2),
    "AddmmBackward0": (1, 2, 0),
    "MmBackward0": (0, 1, None),
    "LinearBackward0": (0, 1, 2),
    "BmmBackward0": (0, 1, None),
}
# Norms that are a single node. A batch norm in evaluation divides by constants, but the
# model has a norm there as soon as it trains.
WHOLE_NORMS = frozenset(
    {
        "NativeLayerNormBackward0",
        "FusedRmsNormBackward0",
        "NativeGroupNormBackward0",
        "_ResizeBackward",
        "NativeBatchNormBackward0",
        "CudnnBatchNormBackward0",
        "MiopenBatchNormBackward0",
    }
)
NORMS = WHOLE_NORMS | {
    "RsqrtBackward0",
    "LinalgVectorNormBackward0",
    "NormBackward1",
    "NormBackward0",
}
# What a norm that is written out divides by or subtracts.
_STATISTICS = ("MeanBackward", "VarBackward", "StdBackward", "SumBackward")
# Beyond these nodes, the search has left the attention.
_ENDS = ("Softmax", "ScaledDotProduct", "Embedding", "Gelu", "CrossEntropy", "NllLoss")
_TURNS = ("TBackward0", "Transpose", "PermuteBackward0")
# Nodes that pick elements: the rows of their output are not those of their input.
_PARTS = ("Slice", "Split", "Select", "Narrow", "Unbind", "Index")
# Nodes that rearrange elements.
MOVES = (
    *("View", "UnsafeView", "ReshapeAlias", "AsStrided", "Alias", "Transpose"),
    *("Permute", "TBackward", "Cat", "Stack", "Unsqueeze", "Squeeze", "Expand"),
    *("Clone", "ToCopy", "Neg", "Repeat", "Roll", "Flip", "Unfold", *_PARTS),
)
_OF_PARAMETERS = (*MOVES, "Mul", "Div", "Embedding", "Gather", "Upsample", "AddBack")
_LIMIT = 4000


Bias = tuple[GradientEdge, tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A product activations · weight in the graph.

    Attributes:
        node: the node whose output holds the features, in dimension `features`.
        parameter: the name of the weight.
        axis: 0 if its rows produce the features, 1 if its columns do.
        size: the number of these rows or columns.
        order: the row or column that produces each feature, if they are not in order.
        bias: the vector that is added to the features, and the parameters behind it.
        normed: whether there is a norm between the projection and q or k.
        above: the projections from which its input is computed.
        table: whether the node is the parameter itself, all of which all heads use, as
            for a table of positions.
    """

    node: Node
    parameter: str
    axis: int = 0
    size: int
    order: Tensor | None = None
    features: int = -1
    bias: Bias | None = None
    normed: bool = False
    above: tuple[Projection, ...] = ()
    table: bool = False

    @property
    def input(self) -> Node | None:
        """The node of the activations, or None if they need no gradient."""
        if self.table:
            return None
        return self.node.next_functions[_MATRIX[self.node.name()][0]][0]

    @property
    def convolves(self) -> bool:
        """True for a convolution."""
        return self.node.name() == _CONVOLUTION

    def by_feature(self, grad: Tensor) -> Tensor:
        """A gradient at the node, reshaped to [all other dimensions, features]."""
        grad = grad.detach().movedim(self.features, -1)
        return grad.reshape(-1, grad.shape[-1])

    def reached(self, grad: Tensor | None) -> Tensor:
        """The indices of the rows or columns whose features a gradient reaches."""
        if grad is None:
            return torch.empty(0, dtype=torch.int64)
        return self.rows(self.by_feature(grad).ne(0).any(0).nonzero().flatten().cpu())

    def rows(self, features: Tensor) -> Tensor:
        """The indices of the rows or columns that produce features."""
        return features if self.order is None else self.order[features].unique()

    def bias_shift(self, rows: Tensor) -> tuple[Tensor | None, int]:
        """The parameter that is added to the features of these rows, and the index of
        an entry minus that of its feature."""
        # After a rearrangement, or an addition to a view, features are not in order.
        if self.bias is None or self.order is not None:
            return None, 0
        edge, vectors = self.bias
        for vector in vectors:
            if variable_of(edge.node) is vector:
                return (vector, 0) if len(vector) == self.size else (None, 0)
            shifts: set[int | None] = set()
            for feature in (int(rows.min()), int(rows.max())):
                one_hot = output_like(edge.node)
                if one_hot.shape != (self.size,):
                    return None, 0
                one_hot[feature] = 1.0
                (grad,) = torch.autograd.grad(
                    edge, vector, one_hot, retain_graph=True, allow_unused=True
                )
                entries = [] if grad is None else grad.nonzero().flatten().tolist()
                shifts |= {entry - feature for entry in entries} or {None}
            shift = shifts.pop()
            if not shifts and shift is not None:
                return vector, shift
        return None, 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """What the graph behind q or k shows.

    Attributes:
        nearest: the nearest projections.
        mixers: the nodes of norms in between.
        opaque: the names of parameters that are a factor of a product, but whose rows
            cannot be assigned to heads.
        tables: the nodes of parameters that were concatenated with the outputs of the
            projections, such as learned keys that precede those of the tokens.
    """

    nearest: tuple[Projection, ...]
    mixers: tuple[Node, ...] = ()
    opaque: tuple[str, ...] = ()
    tables: tuple[Node, ...] = ()


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of parameters by identity; a tied parameter has its first name."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key, p in parameters_of(module).items():
            if p is not None:
                names.setdefault(id(p), f"{prefix}{key}")
    return names


def leaves_of(start: Node | None, stops: set[Node]) -> list[Node] | None:
    """The parameters' nodes behind a node that is computed only from parameters, by
    views, indices, sums and constant factors. None for any other node, or if `stops`
    are reached."""
    visited: set[Node] = set()
    queue = [] if start is None else [start]
    leaves = []
    while queue:
        node = queue.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in stops or len(visited) > 40:
            return None
        if variable_of(node) is not None:
            leaves.append(node)
        elif not node.name().startswith(_OF_PARAMETERS):
            return None
        queue += inputs_of(node)
    return leaves or None


def parameters_behind(
    start: Node | None, stops: set[Node]
) -> tuple[list[Tensor], bool]:
    """The leaves from which a node is computed without passing `stops`, and whether none of them lies behind another
    attention."""
    ends = ("Softmax", "ScaledDotProduct")
    nodes = _behind(start, stops, ends)
    leaves = [variable_of(node) for node in nodes if variable_of(node) is not None]
    return leaves, not any(node.name().startswith(ends) for node in nodes)


def functions_behind(start: Node, stops: set[Node]) -> list[str]:
    """The names of the autograd.Functions through which a node is computed."""
    names = [
        node.name().removesuffix("Backward")
        for node in _behind(start, stops)
        if isinstance(node, BackwardCFunction)
    ]
    return list(dict.fromkeys(names))


def _behind(
    start: Node | None, stops: set[Node], ends: tuple[str, ...] = ()
) -> list[Node]:
    """The nodes from which a node is computed, without passing `stops` or nodes whose names start with one of `ends`."""
    visited, queue = dict.fromkeys(stops, False), [] if start is None else [start]
    while queue:
        node = queue.pop()
        if node not in visited:
            visited[node] = True
            queue += [] if node.name().startswith(ends) else inputs_of(node)
    return [node for node, is_behind in visited.items() if is_behind]


def walk(start: Node, stops: set[Node], names: dict[int, str], depth: int = 3) -> Walk:
    """The projections nearest to `start`, each with the projections above it, without
    going beyond `stops`."""
    nearest: dict[Node, Projection] = {}
    mixers: dict[Node, None] = {}
    opaque: dict[str, None] = {}
    tables: dict[Node, None] = {}
    visited: set[tuple[Node, bool]] = set()
    queue: list[tuple[Node, bool, Bias | None]] = [(start, False, None)]
    while queue and len(visited) < _LIMIT:
        node, normed, bias = queue.pop(0)
        name = node.name()
        if (node, normed) in visited or node in stops or name.startswith(_ENDS):
            continue
        visited.add((node, normed))
        projection = _projection(node, names, normed, stops, depth)
        if projection is not None:
            # A norm that is written out leads to its projection by two ways, of which
            # only the one through the divisor passes a norm.
            if node not in nearest or normed:
                nearest[node] = dataclasses.replace(
                    projection, bias=projection.bias or bias
                )
            continue
        if name in _MATRIX and name != _CONVOLUTION:
            for factor, _ in node.next_functions:
                leaves = leaves_of(factor, stops) or ()
                opaque |= dict.fromkeys(
                    names[id(variable_of(leaf))]
                    for leaf in leaves
                    if variable_of(leaf).ndim > 1 and id(variable_of(leaf)) in names
                )
        if name == "CatBackward0":
            for part in inputs_of(node):
                leaves = leaves_of(part, stops) or ()
                if len(leaves) == 1 and _is_matrix(variable_of(leaves[0]), names):
                    tables[leaves[0]] = None
        if name in NORMS:
            # A term that is added after a norm is the norm's bias.
            normed, bias = True, None
        elif name == "AddBackward0":
            biases = [
                b for edge in node.next_functions if (b := _bias(edge, stops, names))
            ]
            bias = biases[0] if len(biases) == 1 else bias
        if name in NORMS or name.startswith(_STATISTICS):
            mixers[node] = None
        queue += [(above, normed, bias) for above in inputs_of(node)]
    return Walk(
        nearest=tuple(nearest.values()),
        # Means and sums through which all of x passes belong to no norm: they pool, or
        # rotate by 2 × 2 matrices.
        mixers=tuple(
            node
            for node in mixers
            if node.name() in NORMS
            or _reached(node, None, stops, nearest)
            <= _reached(start, node, stops, nearest)
        ),
        opaque=tuple(opaque),
        tables=tuple(tables),
    )


def _is_matrix(variable: Tensor, names: dict[int, str]) -> bool:
    return id(variable) in names and variable.ndim > 1


def _bias(
    edge: tuple[Node | None, int], stops: set[Node], names: dict[int, str]
) -> Bias | None:
    """A bias with the named vectors behind it, of which it may be one, a slice of one
    or several joined (BEiT's q_bias, 0, v_bias)."""
    node, number = edge
    vectors = tuple(variable_of(leaf) for leaf in leaves_of(node, stops) or ())
    if node is None or not vectors:
        return None
    if any(v.ndim != 1 or id(v) not in names for v in vectors):
        return None
    return GradientEdge(node, number), vectors


def _reached(
    start: Node,
    without: Node | None,
    stops: set[Node],
    projections: dict[Node, Projection],
) -> set[Node]:
    """The projections that are reached from a node without passing another node."""
    visited: set[Node] = set()
    queue = [start]
    while queue:
        node = queue.pop()
        if node is without or node in visited or node in stops:
            continue
        visited.add(node)
        if node not in projections and not node.name().startswith(_ENDS):
            queue += inputs_of(node)
    return visited & projections.keys()


def _projection(
    node: Node, names: dict[int, str], normed: bool, stops: set[Node], depth: int
) -> Projection | None:
    """The product with a weight that a node computes, or None."""
    if node.name() not in _MATRIX:
        return None
    factors = [factor for factor, _ in node.next_functions]
    x, w, b = _MATRIX[node.name()]
    weight = _weight(factors[w], names)
    if weight is None:
        return None
    variable, turned = weight
    order = None
    if node.name() == _CONVOLUTION:
        # A transposed convolution has the input features as its first dimension.
        if variable.ndim < 3 or is_transposed(node):
            return None
        axis = 0
    elif variable.ndim == 2:
        if node.name() == "BmmBackward0":
            # An einsum may permute its operands in any way.
            turned = _makes_rows(node, variable)
        axis = 0 if node.name() == "LinearBackward0" or turned else 1
    elif variable.ndim == 3 and (order_of_features := _order(node, variable)):
        axis, order = order_of_features
    else:
        return None
    above: tuple[Projection, ...] = ()
    after = factors[x]
    if depth > 1 and after is not None:
        # A norm ends the path, because the weights before it do not scale the logit.
        above = tuple(
            p for p in walk(after, stops, names, depth - 1).nearest if not p.normed
        )
    # Without a bias, a linear node has no input for it.
    edges = (*node.next_functions, (None, 0))
    return Projection(
        node=node,
        parameter=names[id(variable)],
        axis=axis,
        size=variable.flatten(1).shape[axis],
        order=order,
        features=1 if node.name() == _CONVOLUTION else -1,
        bias=None if b is None else _bias(edges[b], stops, names),
        normed=normed,
        above=above,
    )


def _weight(start: Node | None, names: dict[int, str]) -> tuple[Tensor, bool] | None:
    """The parameter behind a weight, and whether it was transposed on the way. The
    operations of a parametrization are traced through if they lead only to
    parameters."""
    turned = {} if start is None else {start: False}
    queue = list(turned)
    matrices = []
    while queue:
        node = queue.pop(0)
        variable = variable_of(node)
        if variable is not None:
            if id(variable) not in names:
                return None
            if variable.ndim > 1:
                matrices.append((variable, turned[node]))
            continue
        if node.name() in _MATRIX or node.name().startswith(_PARTS) or len(turned) > 40:
            return None
        for above in inputs_of(node):
            if above not in turned:
                turned[above] = turned[node] ^ node.name().startswith(_TURNS)
                queue.append(above)
    if len(matrices) > 1:
        # Among several, a matrix of one row or column is a gain, such as the magnitudes of weight norm [out 1].
        matrices = [x for x in matrices if len(x[0]) > 1 and x[0][0].numel() > 1]
    return matrices[0] if len(matrices) == 1 else None


def _makes_rows(node: Node, weight: Tensor) -> bool:
    """True if a row of a matrix produces a feature of the product, False if a column
    does; determined by the gradient of one feature."""
    one_hot = output_like(node)
    one_hot[..., 0] = 1.0
    edge = GradientEdge(node, 0)
    (grad,) = torch.autograd.grad(edge, weight, one_hot, retain_graph=True)
    return int(grad.ne(0).any(1).sum()) <= int(grad.ne(0).any(0).sum())


def _order(node: Node, weight: Tensor) -> tuple[int, Tensor] | None:
    """The axis and order of the features for a weight of three dimensions, [m h d] or
    [h m d]. Each feature gets a number, and one gradient for each bit of these numbers
    shows which entries produce the feature."""
    out = output_like(node)
    if out.ndim > 2 and out.shape[:-2].numel() > 1:
        return None
    n = out.shape[-1]
    numbers = torch.arange(1, n + 1, device=out.device)
    codes = torch.zeros(weight.shape, dtype=torch.int64, device=out.device)
    for bit in range(n.bit_length()):
        has_bit = ((numbers >> bit) & 1).to(out).expand_as(out)
        edge = GradientEdge(node, 0)
        (grad,) = torch.autograd.grad(edge, weight, has_bit, retain_graph=True)
        codes |= grad.ne(0).long() << bit
    # By axis: the feature of each column (of the flattened weight) or row, if it is the
    # same for all of its entries but those whose other factor is zero for all tokens.
    flat = codes.flatten(1)
    columns = flat.amax(0)
    consistent = bool(((flat == 0) | (flat == columns)).all())
    if consistent and torch.equal(columns.sort().values, numbers):
        return 1, columns.argsort().cpu()
    makers = codes.new_full((n + 1,), -1)
    for row, features in enumerate(flat):
        of_row = features[features > 0].unique()
        if bool((of_row > n).any()) or bool((makers[of_row] >= 0).any()):
            return None
        makers[of_row] = row
    return (0, makers[1:].cpu()) if bool((makers[1:] >= 0).all()) else None
