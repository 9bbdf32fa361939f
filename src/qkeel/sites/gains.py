"""The norms that q and k come through last, and which numbers of their gains and biases belong to each head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qkeel.sites.norms import Kind, Norm, norms
from qkeel.spec.norm import GainNorm, L2Norm, LayerNorm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormGain:
    """A norm on q or k: it leaves the heads it serves no longer than factor · (length · max|offset + g| + ‖b‖).

    `size` numbers are normalised together; `length` is √size, or 1 after L2. `parameter` holds g, `bias` b, None where
    there is none; `index` and `bias_index` [n r] are the places of each head's numbers in them, flattened, n = 1
    where all heads share them. offset: 1 where the gain is 1 + w. factor: what comes after the norm, such as a
    stretched rotation, on the example that the site was found with. A layer norm that is written out is the RMS norm
    of x less its mean.
    """

    kind: Kind
    size: int
    heads: tuple[int, ...]
    parameter: str | None = None
    offset: float = 0.0
    index: Tensor | None = None
    bias: str | None = None
    bias_index: Tensor | None = None
    factor: float = 1.0

    @property
    def length(self) -> float:
        """Largest L2 norm without the gain."""
        return 1.0 if self.kind == "l2" else math.sqrt(self.size)


def own_gains(norm: object, prefix: str, part: Literal["q", "k"], heads: int, head_dim: int) -> tuple[NormGain, ...]:
    """What the norm slot of an own module does to q or k; empty where it leaves that side alone."""
    if not isinstance(norm, GainNorm) or part not in norm.on:
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
    kind: Kind = "l2" if isinstance(norm, L2Norm) else "layer" if isinstance(norm, LayerNorm) else "rms"
    return (
        NormGain(
            kind=kind,
            size=head_dim if norm.over == "head" else heads * head_dim,
            heads=tuple(range(heads)),
            parameter=None if index is None else name,
            offset=1.0 if norm.gain == "one_plus_dim" else 0.0,
            index=index,
            bias=f"{name}_bias" if norm.bias else None,
            bias_index=index if norm.bias else None,
        ),
    )


def seen_gains(x: Tensor, names: dict[int, str]) -> tuple[NormGain, ...]:
    """The norms that x [b h t d] came through last; empty unless every number of it came through one that is told.

    A walk back through its graph: what moves numbers about, adds, or multiplies by constants is passed, up to the
    norm; anything else ends it. One gradient per head tells which heads a norm serves and by what part of its gain,
    and how much what follows stretches them.
    """
    found = None if x.grad_fn is None else norms(x.grad_fn, names)
    if not found:
        return ()
    gains = [_told(x, norm, names) for norm in found]
    told = [g for g in gains if g is not None]
    served = sorted(h for g in told for h in g.heads)
    return tuple(told) if len(told) == len(gains) and served == list(range(x.shape[1])) else ()


def _told(x: Tensor, norm: Norm, names: dict[int, str]) -> NormGain | None:
    heads, gains, biases, factor = [], [], [], 0.0
    for h in range(x.shape[1]):
        stretch, gain, bias = _reached(x[:, h], norm)
        if stretch > 0:
            heads.append(h)
            gains.append(gain)
            biases.append(bias)
            factor = max(factor, stretch)
    if not heads or norm.size < x.shape[-1]:  # parts of a head normed apart: not told
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
    """How much one head [b t d] stretches what the norm gives, and the places of gain and bias that reach it."""
    parameters = [p for p in (norm.gain, norm.bias) if p is not None]
    stretch, sums = 0.0, [torch.zeros_like(p, dtype=torch.bool) for p in parameters]
    for probe in _one_hot(x):
        ends: Any = [GradientEdge(norm.outer, 0), *parameters]
        grad, *rest = torch.autograd.grad(x, ends, probe, retain_graph=True, allow_unused=True)
        if grad is None:
            return 0.0, None, None
        stretch = max(stretch, float(grad.detach().double().norm(dim=-1).max()))
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
