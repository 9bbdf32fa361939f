"""The last norms of q and k, found in the autograd graph, and their gains and biases for each head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from qkeel.functional.norms import widest
from qkeel.heads.site import Kind, NormGain
from qkeel.heads.walk import MOVES, variable_of
from qkeel.patching.autograd import normalized_shape, saved_gain, saved_operand
from qkeel.spec.norm import Norm as SpecNorm

# MOVES and the operations that add values. Both preserve norms, or stretch them by a factor that a probe shows.
_SUMS = ("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0")
_CASTS = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Unsqueeze",
    "Expand",
    "ToCopy",
    "Clone",
    "AddBackward",
)
_ROOTS = ("Rsqrt", "Sqrt", "Pow", "Reciprocal", "ClampMin", "ClampBackward", *_CASTS)
_FUSED: dict[str, Kind] = {
    "NativeLayerNormBackward0": "layer",
    "FusedRmsNormBackward0": "rms",
}
_LENGTHS = ("LinalgVectorNorm", "NormBackward", "SumBackward1")
_LIMIT = 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphNorm:
    """A norm in the graph. `outer` is its last node, which is the node of the norm, of its gain or of its bias."""

    kind: Kind
    size: int
    outer: Node
    gain: Tensor | None
    offset: float
    bias: Tensor | None
    factor: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _At:
    """The state of the search at a node, and what it has passed since the gain or bias of a norm."""

    node: Node
    outer: Node | None = None
    gain: Tensor | None = None
    offset: float = 0.0
    bias: Tensor | None = None
    factor: float = 1.0


def norms(start: Node, names: dict[int, str]) -> list[GraphNorm] | None:
    """The last norms through which all inputs of a node have passed, or None if some input passed through no norm or
    this is unclear."""
    found: dict[Node, GraphNorm] = {}
    seen: set[Node] = set()
    queue = [_At(node=start)]
    while queue:
        at = queue.pop()
        if at.node in seen:
            continue
        seen.add(at.node)
        norm = _norm(at, names)
        if norm is not None:
            found[at.node] = norm
            continue
        after = _onward(at, names)
        if not after or len(seen) > _LIMIT:
            return None
        queue += after
    return list(found.values())


def _onward(at: _At, names: dict[int, str]) -> list[_At] | None:
    """The inputs of a node that is not a norm, or None if the search ends there."""
    node, inputs = at.node, _inputs(at.node)
    name = node.name()
    if name.startswith(MOVES):
        return [dataclasses.replace(at, node=n) for n in inputs]
    if not name.startswith(_SUMS):
        return None
    if len(inputs) == 1:  # the other operand is a constant
        if at.outer is None:
            return [_At(node=inputs[0])]
        if name != "MulBackward0":
            return None
        constant = saved_operand(node, 1 - _places(node)[0])
        if constant is None:
            return None
        return [
            dataclasses.replace(
                at, node=inputs[0], factor=at.factor * float(constant.abs().max())
            )
        ]
    parameters = [_parameter(n, names) for n in inputs]
    if all(p is None for p in parameters):
        return (
            None
            if at.outer is not None or name in ("MulBackward0", "DivBackward0")
            else [_At(node=n) for n in inputs]
        )
    if all(p is not None for p in parameters):
        return None
    i = 0 if parameters[0] is not None else 1
    parameter = parameters[i]
    assert parameter is not None
    if name == "AddBackward0" and at.outer is None:
        return [_At(node=inputs[1 - i], outer=node, bias=parameter)]
    offset = _offset(parameter, saved_operand(node, i))
    if name != "MulBackward0" or at.gain is not None or offset is None:
        return None
    return [
        dataclasses.replace(
            at,
            node=inputs[1 - i],
            outer=at.outer or node,
            gain=parameter,
            offset=offset,
        )
    ]


def _norm(at: _At, names: dict[int, str]) -> GraphNorm | None:
    """The norm whose final product (or quotient) is this node, or which this node computes by itself."""
    name, node = at.node.name(), at.node
    if name in _FUSED:
        return _fused(at, names)
    found = _statistic(node) if name in ("MulBackward0", "DivBackward0") else None
    if found is None:
        return None
    kind, size = found
    return GraphNorm(
        kind=kind,
        size=size,
        outer=at.outer or node,
        gain=at.gain,
        offset=at.offset,
        bias=at.bias,
        factor=at.factor,
    )


def _fused(at: _At, names: dict[int, str]) -> GraphNorm | None:
    node, shape = at.node, normalized_shape(at.node)
    inner = [
        None if n is None else _parameter(n, names) for n, _ in node.next_functions[1:]
    ]
    unknown = any(
        p is None and n is not None for p, (n, _) in zip(inner, node.next_functions[1:])
    )
    gain, bias = (*inner, None, None)[:2]
    if (
        len(shape) != 1
        or unknown
        or (at.outer is not None and (gain is not None or bias is not None))
    ):
        return None
    offset = at.offset if gain is None else _offset(gain, saved_gain(node))
    if offset is None:
        return None
    return GraphNorm(
        kind=_FUSED[node.name()],
        size=int(shape[0]),
        outer=at.outer or node,
        gain=at.gain if gain is None else gain,
        offset=offset,
        bias=at.bias if bias is None else bias,
        factor=at.factor,
    )


def _statistic(node: Node) -> tuple[Kind, int] | None:
    """The kind and size of the norm if a product or quotient of two tensors is a norm over the last dimension, which is
    checked on its values."""
    places = _places(node)
    if len(places) != 2:
        return None
    x, y = saved_operand(node, 0), saved_operand(node, 1)
    if x is None or y is None:
        return None
    divided = node.name() == "DivBackward0"
    for i in (1,) if divided else (0, 1):
        end = _root(node.next_functions[i][0])
        if end is None:
            continue
        size = int((y if i == 0 else x).shape[-1])
        kind: Kind = "l2" if end.name().startswith(_LENGTHS) else "rms"
        out = (
            (x / y if divided else x * y)
            .detach()
            .to(widest(x.device))
            .norm(dim=-1)
            .max()
        )
        limit = 1.0 if kind == "l2" else math.sqrt(size)
        tolerance = 4 * float(torch.finfo(x.dtype).eps) * math.sqrt(size)
        if 0 < float(out) <= limit * (1 + tolerance):
            return kind, size
    return None


def _root(node: Node | None) -> Node | None:
    """The node that computes the mean of squares, sum of squares or vector norm used to compute a factor."""
    for _ in range(12):
        if node is None:
            return None
        name = node.name()
        if name.startswith((*_LENGTHS, "MeanBackward1", "VarBackward", "StdBackward")):
            return node
        inputs = _inputs(node)
        if not name.startswith(_ROOTS) or len(inputs) != 1:
            return None
        node = inputs[0]
    return None


def _parameter(node: Node, names: dict[int, str]) -> Tensor | None:
    """The parameter from which an operand is obtained by casts, views or the addition of a constant, or None."""
    for _ in range(8):
        variable = variable_of(node)
        if variable is not None:
            return variable if id(variable) in names else None
        inputs = _inputs(node)
        if not node.name().startswith(_CASTS) or len(inputs) != 1:
            return None
        node = inputs[0]
    return None


def _offset(parameter: Tensor, used: Tensor | None) -> float | None:
    """The constant, 0 or 1, that was added to the parameter before it was used, or None if anything else was done to
    it."""
    if used is None or used.numel() != parameter.numel():
        return None
    was, now = (x.detach().flatten().to(widest(x.device)) for x in (parameter, used))
    tolerance = 4 * float(torch.finfo(used.dtype).eps)
    near = (
        o
        for o in (0.0, 1.0)
        if torch.allclose(was + o, now, rtol=tolerance, atol=tolerance)
    )
    return next(near, None)


def _inputs(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def _places(node: Node) -> list[int]:
    return [i for i, (n, _) in enumerate(node.next_functions) if n is not None]


# --- The last norms that q and k pass through, and the indices of the gains and biases that belong to each head


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
    places = {
        "dim": torch.arange(head_dim)[None],
        "one_plus_dim": torch.arange(head_dim)[None],
        "head_dim": torch.arange(heads * head_dim).view(heads, head_dim),
        "scalar": torch.zeros(1, 1, dtype=torch.int64),
        "head": torch.arange(heads)[:, None],
    }
    name = f"{prefix}{'q' if norm.shared else part}_norm"
    index = places.get(norm.gain)
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
    found = None if x.grad_fn is None else norms(x.grad_fn, names)
    if not found:
        return ()
    gains = [_gain(x, norm, names) for norm in found]
    known = [g for g in gains if g is not None]
    served = sorted(h for g in known for h in g.heads)
    return (
        tuple(known)
        if len(known) == len(gains) and served == list(range(x.shape[1]))
        else ()
    )


def _gain(x: Tensor, norm: GraphNorm, names: dict[int, str]) -> NormGain | None:
    heads, gains, biases, factor = [], [], [], 0.0
    for h in range(x.shape[1]):
        stretch, gain, bias = _reached(x[:, h], norm)
        if stretch > 0:
            heads.append(h)
            gains.append(gain)
            biases.append(bias)
            factor = max(factor, stretch)
    if (
        not heads or norm.size < x.shape[-1]
    ):  # parts of a head are normalised separately
        return None
    gain_index, bias_index = _stacked(gains), _stacked(biases)
    if (gain_index is None) != (norm.gain is None) or (bias_index is None) != (
        norm.bias is None
    ):
        return None
    return NormGain(
        kind=norm.kind,
        size=norm.size,
        heads=tuple(heads),
        parameter=None if norm.gain is None else names[id(norm.gain)],
        offset=norm.offset,
        index=gain_index,
        bias=None if norm.bias is None else names[id(norm.bias)],
        bias_index=bias_index,
        factor=norm.factor * factor,
    )


def _reached(x: Tensor, norm: GraphNorm) -> tuple[float, Tensor | None, Tensor | None]:
    """The factor by which one head [b t d] is stretched after the norm, and the indices of the gain and bias entries
    that affect it."""
    parameters = [p for p in (norm.gain, norm.bias) if p is not None]
    stretch, sums = 0.0, [torch.zeros_like(p, dtype=torch.bool) for p in parameters]
    for probe in _one_hot(x):
        ends: Any = [GradientEdge(norm.outer, 0), *parameters]
        grad, *rest = torch.autograd.grad(
            x, ends, probe, retain_graph=True, allow_unused=True
        )
        if grad is None:
            return 0.0, None, None
        stretch = max(
            stretch, float(grad.detach().to(widest(grad.device)).norm(dim=-1).max())
        )
        sums = [s if g is None else s | g.detach().ne(0) for s, g in zip(sums, rest)]
    found: Iterator[Tensor] = (s.flatten().nonzero().flatten().cpu() for s in sums)
    gain = None if norm.gain is None else next(found)
    return stretch, gain, None if norm.bias is None else next(found)


def _one_hot(x: Tensor) -> Iterator[Tensor]:
    """Yields gradients [b t d], each with a single nonzero feature per token, until every feature of the head was
    used."""
    b, t, d = x.shape
    token = torch.arange(b * t, device=x.device).view(b, t)
    for start in range(0, d, b * t):
        place = ((token + start) % d)[..., None]
        yield torch.zeros_like(x).scatter_(-1, place, 1.0)


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    """The indices stacked as [n r], or as [1 r] if they are the same for all heads; None if there are none or if their
    numbers differ."""
    known = [p for p in parts if p is not None]
    if (
        len(known) != len(parts)
        or len({len(p) for p in known}) != 1
        or not len(known[0])
    ):
        return None
    index = torch.stack(known)
    return index[:1] if bool((index == index[:1]).all()) else index
