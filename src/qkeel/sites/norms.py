"""The last norms of q and k, found in the autograd graph, and their gains and biases for each head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from qkeel.functional.norms import widest
from qkeel.patching.autograd import (
    inputs_of,
    normalized_shape,
    saved_gain,
    saved_operand,
    variable_of,
)
from qkeel.sites.graph import MOVES
from qkeel.sites.site import Kind, NormGain
from qkeel.spec.norm import Norm as SpecNorm

_SUMS = ("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0")
_CASTS = (
    *("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Expand", "ToCopy"),
    *("Clone", "AddBackward"),
)
_ROOTS = ("Rsqrt", "Sqrt", "Pow", "Reciprocal", "ClampMin", "ClampBackward", *_CASTS)
_FUSED: dict[str, Kind] = {
    "NativeLayerNormBackward0": "layer",
    "FusedRmsNormBackward0": "rms",
}
_LENGTHS = ("LinalgVectorNorm", "NormBackward", "SumBackward1")
_MEANS = ("MeanBackward1", "VarBackward", "StdBackward")
_LIMIT = 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphNorm:
    """A norm in the graph, or what was passed on the way to one. `outer` is its last node, which is the node of the
    norm, of its gain or of its bias."""

    kind: Kind = "rms"
    size: int = 0
    outer: Node | None = None
    gain: Tensor | None = None
    offset: float = 0.0
    bias: Tensor | None = None
    factor: float = 1.0


def norms(start: Node, names: dict[int, str]) -> list[GraphNorm] | None:
    """The last norms through which all inputs of a node have passed, or None if some input passed through no norm or
    this is unclear."""
    by_node: dict[Node, GraphNorm] = {}
    visited: set[Node] = set()
    queue = [(start, GraphNorm())]
    while queue:
        node, passed = queue.pop()
        if node in visited:
            continue
        visited.add(node)
        statistic = _FUSED.get(node.name()) or _statistic(node)
        if statistic is not None:
            norm = _norm(node, statistic, passed, names)
            if norm is None:
                return None
            by_node[node] = norm
            continue
        further = _onward(node, passed, names)
        if not further or len(visited) > _LIMIT:
            return None
        queue += further
    return list(by_node.values())


def _norm(
    node: Node,
    statistic: Kind | tuple[Kind, int],
    passed: GraphNorm,
    names: dict[int, str],
) -> GraphNorm | None:
    """The norm that a node computes; None if what it multiplies by is unknown."""
    outer = passed.outer or node
    if isinstance(statistic, tuple):
        kind, size = statistic
        return dataclasses.replace(passed, kind=kind, size=size, outer=outer)
    shape = normalized_shape(node)
    operands = [n for n, _ in node.next_functions[1:]]
    parameters = [None if n is None else _parameter(n, names) for n in operands]
    if len(shape) != 1 or [n is None for n in operands] != [
        p is None for p in parameters
    ]:
        return None
    norm = dataclasses.replace(passed, kind=statistic, size=int(shape[0]), outer=outer)
    gain, bias = (*parameters, None, None)[:2]
    if gain is None and bias is None:
        return norm
    offset = 0.0 if gain is None else _offset(gain, saved_gain(node))
    if passed.outer is not None or offset is None:
        return None
    return dataclasses.replace(norm, gain=gain, offset=offset, bias=bias)


def _onward(
    node: Node, passed: GraphNorm, names: dict[int, str]
) -> list[tuple[Node, GraphNorm]] | None:
    """The inputs of a node that is not a norm, or None if the search ends there.

    Rearrangements, rotations (sums of products with constants) and a gain or bias may follow a norm. They preserve
    lengths, or stretch them by a factor that a gradient shows.
    """
    name, inputs = node.name(), inputs_of(node)
    if name.startswith(MOVES):
        return [(above, passed) for above in inputs]
    if not name.startswith(_SUMS):
        return None
    if len(inputs) == 1:
        if passed.outer is None:
            return [(inputs[0], passed)]
        place = 0 if node.next_functions[0][0] is None else 1
        constant = saved_operand(node, place) if name == "MulBackward0" else None
        if constant is None:
            return None
        factor = passed.factor * float(constant.abs().max())
        return [(inputs[0], dataclasses.replace(passed, factor=factor))]
    parameters = [_parameter(above, names) for above in inputs]
    places = [i for i, p in enumerate(parameters) if p is not None]
    if not places:
        is_sum = name in ("AddBackward0", "SubBackward0") and passed.outer is None
        return [(above, passed) for above in inputs] if is_sum else None
    if len(places) == 2:
        return None
    place = places[0]
    parameter = parameters[place]
    assert parameter is not None
    if name == "AddBackward0" and passed.outer is None:
        passed = dataclasses.replace(passed, outer=node, bias=parameter)
    elif name == "MulBackward0" and passed.gain is None:
        offset = _offset(parameter, saved_operand(node, place))
        if offset is None:
            return None
        outer = passed.outer or node
        passed = dataclasses.replace(passed, outer=outer, gain=parameter, offset=offset)
    else:
        return None
    return [(inputs[1 - place], passed)]


def _statistic(node: Node) -> tuple[Kind, int] | None:
    """The kind and size of the norm if a product or quotient of two tensors is a norm over the last dimension, which is
    checked on its values."""
    is_quotient = node.name() == "DivBackward0"
    if node.name() not in _SUMS[2:] or len(inputs_of(node)) < 2:
        return None
    x, y = saved_operand(node, 0), saved_operand(node, 1)
    if x is None or y is None:
        return None
    for i in (1,) if is_quotient else (0, 1):
        root: Node | None = node.next_functions[i][0]
        while root is not None and root.name().startswith(_ROOTS):
            above = inputs_of(root)
            root = above[0] if len(above) == 1 else None
        if root is None or not root.name().startswith((*_LENGTHS, *_MEANS)):
            continue
        size = int((x if i else y).shape[-1])
        kind: Kind = "l2" if root.name().startswith(_LENGTHS) else "rms"
        normed = (x / y if is_quotient else x * y).detach().to(widest(x.device))
        limit = 1.0 if kind == "l2" else math.sqrt(size)
        tolerance = 4 * float(torch.finfo(x.dtype).eps) * math.sqrt(size)
        # A norm makes vectors of this length, or shorter ones where its eps counts.
        if 0 < float(normed.norm(dim=-1).max()) <= limit * (1 + tolerance):
            return kind, size
    return None


def _parameter(node: Node, names: dict[int, str]) -> Tensor | None:
    """The parameter from which an operand is obtained by casts, views or the addition of a constant, or None."""
    for _ in range(8):
        variable = variable_of(node)
        if variable is not None:
            return variable if id(variable) in names else None
        inputs = inputs_of(node)
        if not node.name().startswith(_CASTS) or len(inputs) != 1:
            return None
        node = inputs[0]
    return None


def _offset(parameter: Tensor, operand: Tensor | None) -> float | None:
    """The constant, 0 or 1, that was added to the parameter before it was used, or None if anything else was done to
    it."""
    if operand is None or operand.numel() != parameter.numel():
        return None
    stored, used = (
        x.detach().flatten().to(widest(x.device)) for x in (parameter, operand)
    )
    tolerance = 4 * float(torch.finfo(operand.dtype).eps)
    for offset in (0.0, 1.0):
        if torch.allclose(stored + offset, used, rtol=tolerance, atol=tolerance):
            return offset
    return None


# --- The norms of each head


def spec_gains(
    norm: SpecNorm, prefix: str, part: Literal["q", "k"], heads: int, head_dim: int
) -> tuple[NormGain, ...]:
    """The norm of q or k in one of qkeel's modules, or an empty tuple if its spec has no norm there or one of a kind
    without a bound.

    Args:
        norm: the norm slot of the module's spec.
        prefix: the prefix of the names of the module's parameters, such as "blocks.0.attn.".
        part: the part whose norm is returned.
        heads: the number of heads of that part.
        head_dim: the number of features per head.
    """
    if norm.kind == "none" or norm.kind == "other" or part not in norm.sides:
        return ()
    indices = {
        "dim": torch.arange(head_dim)[None],
        "one_plus_dim": torch.arange(head_dim)[None],
        "head_dim": torch.arange(heads * head_dim).view(heads, head_dim),
        "scalar": torch.zeros(1, 1, dtype=torch.int64),
        "head": torch.arange(heads)[:, None],
    }
    name = f"{prefix}{'q' if norm.shared else part}_norm"
    index = indices.get(norm.gain)
    return (
        NormGain(
            kind=norm.kind,
            size=head_dim if norm.over == "head" else heads * head_dim,
            heads=tuple(range(heads)),
            parameter=None if index is None else name,
            offset=1.0 if norm.gain == "one_plus_dim" else 0.0,
            index=index,
            bias=f"{name}_bias" if norm.bias else None,
            bias_index=index if norm.bias else None,
        ),
    )


def seen_gains(
    x: Float[Tensor, "b h t d"], names: dict[int, str]
) -> tuple[NormGain, ...]:
    """The last norms that x [b h t d] passed through, or an empty tuple unless every element passed through a known
    norm.

    The search follows the graph back, through rearrangements, additions and multiplications by constants, until it
    reaches the norm; anything else ends the search. One gradient per head shows on which heads a norm acts, which part
    of its gain each head uses, and how much later operations stretch the head.
    """
    gains = []
    for norm in (None if x.grad_fn is None else norms(x.grad_fn, names)) or ():
        gain = _gain(x, norm, names)
        if gain is None:
            return ()
        gains.append(gain)
    heads = sorted(h for gain in gains for h in gain.heads)
    return tuple(gains) if heads == list(range(x.shape[1])) else ()


def _gain(x: Tensor, norm: GraphNorm, names: dict[int, str]) -> NormGain | None:
    """The norm with its entries for each head; None if these are not the same in number."""
    assert norm.outer is not None
    heads: list[int] = []
    entries: tuple[list[Tensor], list[Tensor]] = ([], [])
    factor = 0.0
    _, n, t, d = x.shape
    tokens = torch.arange(x.shape[0] * t, device=x.device).view(-1, t)
    parameters = [p for p in (norm.gain, norm.bias) if p is not None]
    ends: Any = [GradientEdge(norm.outer, 0), *parameters]
    for h in range(n):
        stretch = 0.0
        used = [torch.zeros_like(p, dtype=torch.bool) for p in parameters]
        # Each token shows one feature at a time, until every feature of the head was shown.
        for start in range(0, d, tokens.numel()):
            feature = ((tokens + start) % d)[..., None]
            one_hot = torch.zeros_like(x[:, h]).scatter_(-1, feature, 1.0)
            grad, *rest = torch.autograd.grad(
                x[:, h], ends, one_hot, retain_graph=True, allow_unused=True
            )
            if grad is None:
                break
            lengths = grad.detach().to(widest(grad.device)).norm(dim=-1)
            stretch = max(stretch, float(lengths.max()))
            used = [
                u if g is None else u | g.detach().ne(0) for u, g in zip(used, rest)
            ]
        if stretch > 0:
            heads.append(h)
            factor = max(factor, stretch)
            for numbers, u in zip(entries, used):
                numbers.append(u.flatten().nonzero().flatten().cpu())
    indices = [_stacked(numbers) for numbers in entries[: len(parameters)]]
    # If a norm is smaller than a head, parts of a head are normalised separately.
    if not heads or norm.size < d or None in [i if i is None else 0 for i in indices]:
        return None
    gain_index = None if norm.gain is None else indices[0]
    return NormGain(
        kind=norm.kind,
        size=norm.size,
        heads=tuple(heads),
        parameter=None if norm.gain is None else names[id(norm.gain)],
        offset=norm.offset,
        index=gain_index,
        bias=None if norm.bias is None else names[id(norm.bias)],
        bias_index=None if norm.bias is None else indices[-1],
        factor=norm.factor * factor,
    )


def _stacked(numbers: list[Tensor]) -> Tensor | None:
    """The indices stacked as [n r], or as [1 r] if they are the same for all heads; None if their numbers differ."""
    if len({len(x) for x in numbers}) != 1 or not len(numbers[0]):
        return None
    index = torch.stack(numbers)
    return index[:1] if bool((index == index[:1]).all()) else index
