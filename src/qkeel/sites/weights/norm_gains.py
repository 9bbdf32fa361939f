"""The norms that q and k come through last, with the numbers of their gains and biases that belong to each head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qkeel.functional.norms import widest
from qkeel.sites.site import NormGain
from qkeel.sites.weights.nearest_norms import Norm, norms
from qkeel.spec.norm import Norm as SpecNorm


def spec_gains(norm: SpecNorm, prefix: str, part: Literal["q", "k"], heads: int, head_dim: int) -> tuple[NormGain, ...]:
    """The norm of q or k in a module of qkeel's; empty where its spec has none, or one of a kind without a bound.

    Args:
        norm: the slot of the module's spec.
        prefix: what stands before the names of the module's parameters, such as "blocks.0.attn.".
        part: whose norm.
        heads: how many heads that part has.
        head_dim: numbers per head.
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


def seen_gains(x: Float[Tensor, "b h t d"], names: dict[int, str]) -> tuple[NormGain, ...]:
    """The norms that x [b h t d] came through last; empty unless every number of it came through a known one.

    A walk back through its graph: what moves numbers about, adds, or multiplies by constants is passed, up to the
    norm; anything else ends it. One gradient per head shows which heads a norm serves and by what part of its gain,
    and how much what follows stretches them.
    """
    found = None if x.grad_fn is None else norms(x.grad_fn, names)
    if not found:
        return ()
    gains = [_gain(x, norm, names) for norm in found]
    known = [g for g in gains if g is not None]
    served = sorted(h for g in known for h in g.heads)
    return tuple(known) if len(known) == len(gains) and served == list(range(x.shape[1])) else ()


def _gain(x: Tensor, norm: Norm, names: dict[int, str]) -> NormGain | None:
    heads, gains, biases, factor = [], [], [], 0.0
    for h in range(x.shape[1]):
        stretch, gain, bias = _reached(x[:, h], norm)
        if stretch > 0:
            heads.append(h)
            gains.append(gain)
            biases.append(bias)
            factor = max(factor, stretch)
    if not heads or norm.size < x.shape[-1]:  # parts of a head are normed apart
        return None
    gain_index, bias_index = _stacked(gains), _stacked(biases)
    if (gain_index is None) != (norm.gain is None) or (bias_index is None) != (norm.bias is None):
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


def _reached(x: Tensor, norm: Norm) -> tuple[float, Tensor | None, Tensor | None]:
    """The factor from the norm's output to one head [b t d], and the gain and bias entries that reach it."""
    parameters = [p for p in (norm.gain, norm.bias) if p is not None]
    stretch, sums = 0.0, [torch.zeros_like(p, dtype=torch.bool) for p in parameters]
    for probe in _one_hot(x):
        ends: Any = [GradientEdge(norm.outer, 0), *parameters]
        grad, *rest = torch.autograd.grad(x, ends, probe, retain_graph=True, allow_unused=True)
        if grad is None:
            return 0.0, None, None
        stretch = max(stretch, float(grad.detach().to(widest(grad.device)).norm(dim=-1).max()))
        sums = [s if g is None else s | g.detach().ne(0) for s, g in zip(sums, rest)]
    found: Iterator[Tensor] = (s.flatten().nonzero().flatten().cpu() for s in sums)
    gain = None if norm.gain is None else next(found)
    return stretch, gain, None if norm.bias is None else next(found)


def _one_hot(x: Tensor) -> Iterator[Tensor]:
    """Gradients [b t d], one place of the head at each token, until every place had one."""
    b, t, d = x.shape
    token = torch.arange(b * t, device=x.device).view(b, t)
    for start in range(0, d, b * t):
        place = ((token + start) % d)[..., None]
        yield torch.zeros_like(x).scatter_(-1, place, 1.0)


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    """[n r], or [1 r] where all heads have the same; None where there are none or they are unequal."""
    known = [p for p in parts if p is not None]
    if len(known) != len(parts) or len({len(p) for p in known}) != 1 or not len(known[0]):
        return None
    index = torch.stack(known)
    return index[:1] if bool((index == index[:1]).all()) else index
