"""Angles between queries and keys: their range in training, and the share of pairs of a longer text outside that range.

Shapes: b sequences, h heads, t tokens, s keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.nn.attention import SpecModule
from qkeel.spec import AttentionCall
from qkeel.spec.rope import Position

# Query rows of cosines computed at a time, so that no t × s matrix is held.
_ROWS = 128


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest cosine between q and a visible k in a layer, per head [h]."""

    low: Tensor
    high: Tensor


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Outside:
    """The number of pairs and how many of them lie outside the range, per head of all layers [layers h]."""

    pairs: Tensor
    outside: Tensor

    @property
    def share(self) -> float:
        """The share of pairs outside the range, over all heads."""
        return float(self.outside.sum() / self.pairs.sum())


def cosine_ranges(model: nn.Module, texts: Iterable[Tensor]) -> list[Range]:
    """Returns, per layer, the range of cosines on the texts [b t].

    >>> from qkeel.nn import Decoder, DecoderConfig
    >>> model = Decoder(DecoderConfig(vocab_size=8, d_model=16, n_heads=2, n_layers=3))
    >>> len(cosine_ranges(model, [torch.zeros(1, 4, dtype=torch.int64)]))
    3
    """
    ranges: dict[int, Range] = {}

    def widen(layer: int, call: AttentionCall) -> None:
        for cosines, visible in _cosines(call):
            # A cosine is within ±1, so ±2 never is the extreme.
            low = cosines.masked_fill(~visible, 2.0).amin((0, 2, 3))
            high = cosines.masked_fill(~visible, -2.0).amax((0, 2, 3))
            if layer in ranges:
                low = low.minimum(ranges[layer].low)
                high = high.maximum(ranges[layer].high)
            ranges[layer] = Range(low, high)

    with observed(model, widen):
        for tokens in texts:
            model(tokens)
    return [ranges[layer] for layer in sorted(ranges)]


def outside(
    model: nn.Module, texts: Iterable[Tensor], ranges: Sequence[Range]
) -> Outside:
    """Counts the pairs of texts [b t] that lie outside the ranges of each layer."""
    # float64, which counts exactly, since long texts have more pairs than float32 can tell apart.
    pairs = torch.zeros(len(ranges), len(ranges[0].low), dtype=torch.float64)
    counted = Outside(pairs, pairs.clone())

    def count(layer: int, call: AttentionCall) -> None:
        low = ranges[layer].low[:, None, None]
        high = ranges[layer].high[:, None, None]
        for cosines, visible in _cosines(call):
            is_outside = ((cosines < low) | (cosines > high)) & visible
            counted.pairs[layer] += visible.expand(cosines.shape).sum((0, 2, 3)).cpu()
            counted.outside[layer] += is_outside.sum((0, 2, 3)).cpu()

    with observed(model, count):
        for tokens in texts:
            model(tokens)
    return counted


def attentions(model: nn.Module) -> list[SpecModule]:
    """Returns the attention modules of a model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, SpecModule)]


@contextlib.contextmanager
def observed(
    model: nn.Module, observe: Callable[[int, AttentionCall], None]
) -> Iterator[None]:
    """Calls `observe` with the layer number and the call for each attention call of the model."""
    modules = attentions(model)
    observers = [
        lambda call, layer=layer: observe(layer, call) for layer in range(len(modules))
    ]
    for module, observer in zip(modules, observers, strict=True):
        module.observers.append(observer)
    try:
        yield
    finally:
        for module, observer in zip(modules, observers, strict=True):
            module.observers.remove(observer)


def _cosines(call: AttentionCall) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields blocks of cosines [b h rows s], each with a mask of the visible pairs."""
    # A vector of zeros gets cosines of 0.
    q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in call.encoded())
    # A window hides keys but does not rotate anything.
    position = call.spec.position.unwindowed
    for start in range(0, q.shape[2], _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[2]))
        keys = call.span(rows)
        operands = (
            q[:, :, rows],
            k[:, :, keys],
            call.pos_q[:, rows],
            call.pos_k[:, keys],
            call.params,
        )
        # A clipped distance rotates the pair. A bias on the score does not change the angle, so it is left out.
        if position.kind == "rerope":
            cosines = position.scores(*operands)
        else:
            cosines = Position.scores(position, *operands)
        visible = call.visible(rows, keys)
        yield (
            cosines,
            torch.ones_like(cosines, dtype=torch.bool) if visible is None else visible,
        )
