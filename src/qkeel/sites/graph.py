"""Traces autograd's graph from a query or key back to the weights that it is computed from."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from qkeel.patching.autograd import (
    inputs_of,
    is_transposed,
    output_like,
    variable_of,
)

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
    "SqrtBackward0",
}
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

    def bias_shift(self, first_row: int) -> tuple[Tensor | None, int]:
        """The parameter that is added to the features, of which it may be a part, and
        the index of an entry minus that of its feature."""
        if self.bias is None:
            return None, 0
        edge, vectors = self.bias
        one_hot = output_like(edge.node)
        if one_hot.shape != (self.size,):
            return None, 0
        one_hot[first_row] = 1.0
        for vector in vectors:
            if variable_of(edge.node) is vector:
                return vector, 0
            (grad,) = torch.autograd.grad(
                edge, vector, one_hot, retain_graph=True, allow_unused=True
            )
            entries = [] if grad is None else grad.nonzero().flatten().tolist()
            if len(entries) == 1:
                return vector, entries[0] - first_row
        return None, 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """What the graph behind q or k shows.

    Attributes:
        nearest: the nearest projections.
        norms: the nodes of norms in between.
        opaque: the names of parameters that are a factor of a product, but whose rows
            cannot be assigned to heads.
    """

    nearest: tuple[Projection, ...]
    norms: tuple[Node, ...] = ()
    opaque: tuple[str, ...] = ()


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of parameters by identity; a tied parameter has its first name."""
    named = [*model.named_parameters(remove_duplicate=False)]
    return {id(p): name for name, p in reversed(named)}


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
    norms: dict[Node, None] = {}
    opaque: dict[str, None] = {}
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
        if name in NORMS:
            # A term that is added after a norm is the norm's bias.
            normed, bias = True, None
            norms[node] = None
        elif name == "AddBackward0":
            biases = [
                b for edge in node.next_functions if (b := _bias(edge, stops, names))
            ]
            bias = biases[0] if len(biases) == 1 else bias
        queue += [(above, normed, bias) for above in inputs_of(node)]
    return Walk(
        nearest=tuple(nearest.values()), norms=tuple(norms), opaque=tuple(opaque)
    )


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
    elif variable.flatten(1).shape[1] == output_like(node).shape[-1]:
        # As [m h d] in an einsum; other orders of its columns are not verified.
        axis = 1
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
