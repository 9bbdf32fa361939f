"""Angles between queries and keys: the range that training has, and what lies outside it in a longer text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.functional.bounds import dilution_bound
from qkeel.functional.norms import widest
from qkeel.nn.spec_module import SpecModule
from qkeel.spec import AttentionCall
from qkeel.spec.position.rotary import Position

_ROWS = 128  # of the cosines at a time


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest cosine of a layer's visible pairs, per head [h]."""

    low: Tensor
    high: Tensor


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Outside:
    """Per head of all layers [layers h]: pairs, how many of them lie outside the range, and the largest logit possible.

    largest_logit: scale of the last position · largest norm of a query · largest norm of a key.
    """

    pairs: Tensor
    outside: Tensor
    largest_logit: Tensor

    @property
    def share(self) -> float:
        """Of all pairs of all heads."""
        return float(self.outside.sum() / self.pairs.sum())

    def dilution(self, n: int) -> Tensor:
        """The functional.bounds.dilution_bound of each head's largest logit among n keys, [layers h]."""
        return dilution_bound(self.largest_logit, n)


def cosine_ranges(model: nn.Module, texts: Iterable[Tensor]) -> list[Range]:
    """Per layer the cosines that texts [b t] make its heads meet."""
    ranges: dict[int, Range] = {}

    def widen(layer: int, call: AttentionCall) -> None:
        for cos, seen in _cosines(call):
            low, high = cos.masked_fill(~seen, 2.0).amin((0, 2, 3)), cos.masked_fill(~seen, -2.0).amax((0, 2, 3))
            old = ranges.get(layer)
            ranges[layer] = Range(low, high) if old is None else Range(low.minimum(old.low), high.maximum(old.high))

    with observed(model, widen):
        for tokens in texts:
            model(tokens)
    return [ranges[layer] for layer in sorted(ranges)]


def outside(model: nn.Module, texts: Iterable[Tensor], ranges: Sequence[Range]) -> Outside:
    """The number of pairs of texts [b t] that lie outside the ranges."""
    counts = torch.zeros(len(ranges), len(ranges[0].low), dtype=torch.float64)
    found = Outside(counts, counts.clone(), torch.zeros_like(counts))

    def count(layer: int, call: AttentionCall) -> None:
        low, high = (x[:, None, None] for x in (ranges[layer].low, ranges[layer].high))
        for cos, seen in _cosines(call):
            found.pairs[layer] += seen.expand(cos.shape).sum((0, 2, 3)).cpu()
            found.outside[layer] += (((cos < low) | (cos > high)) & seen).sum((0, 2, 3)).cpu()
        found.largest_logit[layer] = found.largest_logit[layer].maximum(largest_logit(call).cpu())

    with observed(model, count):
        for tokens in texts:
            model(tokens)
    return found


def attentions(model: nn.Module) -> list[SpecModule]:
    """The attentions of a model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, SpecModule)]


@contextlib.contextmanager
def observed(model: nn.Module, see: Callable[[int, AttentionCall], None]) -> Iterator[None]:
    """Shows each attention call of the model, with the number of its layer."""
    modules = attentions(model)
    observers = [lambda call, layer=layer: see(layer, call) for layer in range(len(modules))]
    for module, observer in zip(modules, observers, strict=True):
        module.observers.append(observer)
    try:
        yield
    finally:
        for module, observer in zip(modules, observers, strict=True):
            module.observers.remove(observer)


def _cosines(call: AttentionCall) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of cosines [b h rows s] and of what is visible of them."""
    q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in call.encoded())
    position = call.spec.position.unwindowed  # a window hides keys and turns nothing
    for start in range(0, q.shape[2], _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[2]))
        keys = call.span(rows)
        # A bias on the score turns nothing; a clipped distance turns the pair.
        turn = position.scores if position.kind == "rerope" else lambda *a: Position.scores(position, *a)
        cos = turn(q[:, :, rows], k[:, :, keys], call.pos_q[:, rows], call.pos_k[:, keys], call.params)
        visible = call.visible(rows, keys)
        yield cos, torch.ones_like(cos, dtype=torch.bool) if visible is None else visible


def largest_logit(call: AttentionCall) -> Tensor:
    """Per head [h]: see Outside.largest_logit."""
    q, k = (x.norm(dim=-1).amax((0, 2)) for x in call.encoded())
    factor = call.spec.scale.factor(call.pos_q[:, -1:], call.q.shape[-1], call.params)
    largest = (q * k.repeat_interleave(len(q) // len(k))).to(widest(q.device))
    each = largest[:, None, None] * torch.as_tensor(factor).to(largest).abs()  # of one query, one batch row
    return each.reshape(len(q))
