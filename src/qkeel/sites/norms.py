"""The gains and biases of the norms of q and k, and the entries of them that each head uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from qkeel.patching.autograd import inputs_of, nodes_of, variable_of
from qkeel.sites.graph import leaves_of
from qkeel.sites.rows import Side, probe_weights
from qkeel.sites.site import NormGain
from qkeel.spec.norm import Norm as SpecNorm

_FUSED = ("NativeLayerNormBackward0", "FusedRmsNormBackward0")
_LIMIT = 400
# Of the sum of squares of a head, what rounding may leave unexplained.
_UNEXPLAINED = 1e-3


def spec_gains(
    norm: SpecNorm, prefix: str, part: Literal["q", "k"], heads: int, head_dim: int
) -> tuple[NormGain, ...]:
    """The gain of the norm of q or k in one of qkeel's modules; empty if its spec has no norm or no gain there.

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
    if index is None:
        return ()
    return (
        NormGain(
            heads=tuple(range(heads)),
            parameter=name,
            offset=1.0 if norm.gain == "one_plus_dim" else 0.0,
            index=index,
            bias=f"{name}_bias" if norm.bias else None,
            bias_index=index if norm.bias else None,
        ),
    )


def seen_gains(side: Side, projections: set[str]) -> tuple[NormGain, ...]:
    """The gains by which q or k [b h t d] are multiplied after their last norm, and the biases that are added there.

    A head x is linear in them: x = (offset + gain) · n + bias, whatever rotates it later. So the derivatives of a sum of
    its squares tell them from parameters before the norm, whose size it removes.

    Args:
        side: the q or k of a call, in whose graph there is a norm.
        projections: the names of the parameters of its projections.

    Returns: empty unless every head has one gain, with at most one bias.
    """
    x = side.x
    uses = _parameters_after(side, projections)
    by_use: dict[tuple[str, str | None, float], dict[int, list[Tensor]]] = {}
    for h in range(x.shape[1] if uses else 0):
        head = x[:, h]
        # Uneven ones, as a norm keeps the plain sum of squares whatever is before it.
        weights = head.detach() * probe_weights(head)
        gradients = torch.autograd.grad(
            head,
            [use.parameter for use in uses.values()],
            weights,
            retain_graph=True,
            allow_unused=True,
        )
        used = {
            name: (use, g.detach().double())
            for (name, use), g in zip(uses.items(), gradients)
            if g is not None and bool(g.any())
        }
        gains = [name for name, (use, _) in used.items() if not use.is_added]
        biases = [name for name, (use, _) in used.items() if use.is_added]
        if len(gains) != 1 or len(biases) > 1:
            return ()
        squares = float((head.detach().double() * weights.double()).sum())
        unexplained = squares - sum(
            float((use.parameter.detach().double() * g).sum())
            for use, g in used.values()
        )
        limit = max(_UNEXPLAINED, torch.finfo(x.dtype).eps) * squares
        offset = 0.0
        if abs(unexplained) > limit:
            offset = 1.0
            if abs(unexplained - float(used[gains[0]][1].sum())) > limit:
                return ()
        key = gains[0], biases[0] if biases else None, offset
        by_use.setdefault(key, {})[h] = [
            used[name][1].flatten().nonzero().flatten().cpu() for name in gains + biases
        ]
    norm_gains: list[NormGain] = []
    for (gain, bias, offset), entries in by_use.items():
        index, *of_bias = map(_stacked, zip(*entries.values()))
        if index is None or None in of_bias:
            return ()
        norm_gains.append(
            NormGain(
                heads=tuple(entries),
                parameter=gain,
                offset=offset,
                index=index,
                bias=bias,
                bias_index=of_bias[0] if of_bias else None,
            )
        )
    return tuple(norm_gains)


class _Use(NamedTuple):
    """A parameter between projections and q or k, and whether it is added or multiplied."""

    parameter: Tensor
    is_added: bool


def _parameters_after(side: Side, projections: set[str]) -> Mapping[str, _Use]:
    """The parameters that are multiplied or added between the projections and q or k, by name."""
    stops = nodes_of(side.around.inputs) | {p.node for p in side.walk.nearest}
    uses: dict[str, _Use] = {}
    visited: set[Node] = set()
    queue = [] if side.x.grad_fn is None else [side.x.grad_fn]
    while queue and len(visited) < _LIMIT:
        node = queue.pop()
        if node in visited or node in stops:
            continue
        visited.add(node)
        # What is before a norm that is one node needs no numbers to be told.
        queue += [] if node.name() in _FUSED else inputs_of(node)
        if len(inputs_of(node)) < 2:
            continue
        for position, (operand, _) in enumerate(node.next_functions):
            leaves = leaves_of(operand, stops) or ()
            if len(leaves) != 1:
                continue
            parameter = variable_of(leaves[0])
            name = side.names.get(id(parameter), "")
            if not name or name in projections:
                continue
            is_bias = node.name() in _FUSED and position == 2
            is_added = node.name().startswith(("AddBackward", "SubBackward"))
            uses[name] = _Use(parameter, is_bias or is_added)
    return uses


def _stacked(numbers: tuple[Tensor, ...]) -> Tensor | None:
    """The indices stacked as [n r], or as [1 r] if they are the same for all heads; None if their numbers differ."""
    if len({len(x) for x in numbers}) != 1:
        return None
    index = torch.stack(numbers)
    return index[:1] if bool((index == index[:1]).all()) else index
