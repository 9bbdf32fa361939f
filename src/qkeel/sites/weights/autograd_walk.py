"""The autograd graph between q (or k) and the input of its attention module, as far as weights are concerned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from qkeel.patching.graph_nodes import output_like, slice_of

# What computes activations times weights: which of its inputs is x, the weight, the bias.
_MATRIX = {
    "AddmmBackward0": (1, 2, 0),
    "MmBackward0": (0, 1, None),
    "LinearBackward0": (0, 1, 2),
    "BmmBackward0": (0, 1, None),
}
_NORMS = ("NativeLayerNormBackward0", "FusedRmsNormBackward0", "RsqrtBackward0", "LinalgVectorNormBackward0")
_NORMS_TOO = (
    "_ResizeBackward",
    "NormBackward1",
    "NormBackward0",
    "NativeGroupNormBackward0",
    "NativeBatchNormBackward0",
)
NORMS = frozenset((*_NORMS, *_NORMS_TOO))
# Nodes behind which there is no logit path any more: the walk came out of the attention.
_ENDS = ("Softmax", "ScaledDotProduct", "Embedding", "Gelu", "CrossEntropy", "NllLoss")
_TURNS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "TransposeBackward1"})
_PARTS = ("Slice", "Split", "Select", "Narrow", "Unbind", "Index")
# What moves the numbers of a parameter about, or multiplies them by a constant.
MOVES = (
    *("View", "UnsafeView", "ReshapeAlias", "AsStrided", "Alias", "Transpose", "Permute", "TBackward", "Slice", "Mul"),
    *("Split", "Cat", "Stack", "Unbind", "Select", "Index", "Unsqueeze", "Squeeze", "Expand", "Clone", "ToCopy", "Div"),
    *("Neg", "Repeat", "Roll", "Flip", "Unfold", "Embedding", "Gather"),
)
_LIMIT = 4000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BiasPart:
    """Entries of a parameter that are added to `size` features of a projection, from feature `first` on; `shift` is
    the number of an entry less that of its feature."""

    parameter: str
    first: int
    size: int
    shift: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A product activations · weight in the graph: the node whose output holds the features, and what made it.

    `normed`: a norm lies between it and q or k. `above` are the projections that make its input. `shared`: all heads
    use all of it, as of a table of positions with a row for each feature.
    """

    node: Node
    parameter: str
    axis: int
    size: int
    biases: tuple[BiasPart, ...]
    normed: bool
    above: tuple[Projection, ...] = ()
    shared: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """The result of a walk from q or k: the nearest projections, and norm nodes between.

    `opaque` are the names of parameters that something was multiplied by on the way and of whose rows it is
    not known which make which head: they are no matrices, or a part of one was used.
    """

    nearest: tuple[Projection, ...]
    mixers: tuple[Node, ...]
    opaque: tuple[str, ...] = ()


def names_of(model: nn.Module) -> dict[int, str]:
    """Parameter names by identity; a tied one has its first name."""
    return {id(p): name for name, p in model.named_parameters()}


def nodes_of(inputs: Iterable[Tensor]) -> set[Node]:
    """The graph nodes that made these tensors: where a walk stops."""
    return {x.grad_fn for x in inputs if x.grad_fn is not None}


def leaves_of(start: Node, stops: set[Node]) -> list[Node] | None:
    """The parameters' nodes behind one that was made of parameters alone by views, indices and constant factors; None
    of any other, or where `stops` are among them."""
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
        elif not node.name().startswith(MOVES):
            return None
        queue += [n for n, _ in node.next_functions if n is not None]
    return found


def walk(start: Node, stops: set[Node], names: dict[int, str], depth: int = 3) -> Walk:
    """The projections nearest to `start`, each with those above it; nothing beyond `stops`."""
    found: dict[Node, Projection] = {}
    mixers: list[Node] = []
    opaque: list[str] = []
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
        norm = node.name() in NORMS
        normed = normed or norm
        # What is added after a norm is the norm's bias, not the projection's.
        added = () if norm else _added(node, names) or added
        if _mixes(node):
            mixers.append(node)
        queue += [(n, normed, added) for n, _ in node.next_functions if n is not None]
    return Walk(nearest=tuple(found.values()), mixers=tuple(dict.fromkeys(mixers)), opaque=tuple(dict.fromkeys(opaque)))


def _opaque(node: Node, stops: set[Node], names: dict[int, str]) -> list[str]:
    """The parameters of a product that are no projection's: one of its factors is made of them alone."""
    places = _MATRIX.get(node.name(), ())
    for factor in (node.next_functions[place][0] for place in places[:2]):
        leaves = None if factor is None else leaves_of(factor, stops)
        found = [names.get(id(variable_of(leaf)), "") for leaf in leaves or ()]
        if leaves and all(found):
            return found
    return []


def _mixes(node: Node) -> bool:
    name = node.name()
    return name in NORMS or name.startswith(("MeanBackward", "VarBackward", "StdBackward", "SumBackward"))


def _projection(node: Node, names: dict[int, str], normed: bool, stops: set[Node], depth: int) -> Projection | None:
    places = _MATRIX.get(node.name())
    if places is None:
        return None
    x, w, b = places
    weight = _weight(node.next_functions[w][0], names)
    if weight is None:
        return None
    name, shape, turned, variable = weight
    if node.name() == "BmmBackward0":
        turned = _makes_rows(node, variable)  # an einsum permutes what it multiplies in ways of its own
    after = node.next_functions[x][0]
    linear = node.name() == "LinearBackward0"
    above: tuple[Projection, ...] = ()
    if depth > 1 and after is not None:
        # A norm cuts the path: what lies before it does not scale the logit.
        above = tuple(p for p in walk(after, stops, names, depth - 1).nearest if not p.normed)
    biases = () if b is None or b >= len(node.next_functions) else _biases(node.next_functions[b][0], names)
    axis = 0 if linear or turned else 1
    return Projection(node=node, parameter=name, axis=axis, size=shape[axis], biases=biases, normed=normed, above=above)


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
    (grad,) = torch.autograd.grad(GradientEdge(node, 0), weight, first, retain_graph=True)
    return int(grad.ne(0).any(1).sum()) <= int(grad.ne(0).any(0).sum())


def _weight(node: Node | None, names: dict[int, str]) -> tuple[str, tuple[int, ...], bool, Tensor] | None:
    """The matrix parameter behind a weight, whether it was transposed since, and itself. What a parametrization does
    in between is walked through, if it ends in parameters only."""
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
            if variable.ndim == 2 and min(variable.shape) > 1:
                found.append((names[id(variable)], tuple(variable.shape), turned[at], variable))
            continue
        # A slice of a larger matrix: its rows are not those of the parameter.
        if at.name() in _MATRIX or at.name().startswith(_PARTS) or len(turned) > 40:
            return None
        for n, _ in at.next_functions:
            if n is not None and n not in turned:
                turned[n] = turned[at] ^ (at.name() in _TURNS)
                queue.append(n)
    return found[0] if len(found) == 1 else None
