"""The kernel interface: what a kernel receives, how it refuses a call, and helpers.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, e dimensions per value.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

from qkeel.functional.norms import unrounded
from qkeel.spec.call import AttentionCall, LogitCall
from qkeel.spec.slot import Keys, Logits, Outputs, Queries, Values

# The kernel interface. A kernel refuses what it cannot compute exactly, with the reason, before it computes anything.


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why something cannot be done exactly, and what to do instead."""

    reason: str
    way_out: str = "use impl='chunked' (exact, O(T) memory) or impl='auto'"

    def __str__(self) -> str:
        return f"{self.reason}; {self.way_out}"


class Kernel(abc.ABC):
    """Computes the output [b h t e] of a call."""

    @abc.abstractmethod
    def supports(self, call: AttentionCall) -> Refusal | None:
        """Returns None if this kernel computes the call exactly, otherwise the reason why it does not."""

    @abc.abstractmethod
    def __call__(self, call: AttentionCall) -> Outputs:
        """Returns the output [b h t e] in q's dtype."""


# Helpers that several kernels share: row blocks and the average of values.

# Least rows per block under a narrower window: fewer make inefficient matrix products.
LEAST_UNDER_WINDOW = 128


def row_blocks(call: LogitCall, elements: int, least: int = 1) -> Iterator[slice]:
    """Yields blocks of at least `least` query rows with about `elements` logits each, for O(T) memory at any T.

    Under a window, blocks are about as tall as the window is wide, so that they contain few keys outside it.
    """
    b, h, t, s = call.scores_shape
    rows = max(1, min(t, max(least, elements // max(1, b * h * s))))
    if call.window is not None:
        rows = min(rows, max(LEAST_UNDER_WINDOW, call.window))
    for start in range(0, t, rows):
        yield slice(start, min(t, start + rows))


def average(weights: Logits, v: Values) -> Outputs:
    """Returns weights [b h t s] times v [b g s e]; each key head serves h / g query heads without being repeated."""
    b, h, t, s = weights.shape
    g = v.shape[1]
    with unrounded(v):
        if g == h:
            return weights @ v
        # The query heads that share a key head become rows of one product.
        return (weights.reshape(b, g, h // g * t, s) @ v).view(b, h, t, v.shape[-1])


def without_pairs(q: Queries, k: Keys, v: Values) -> Outputs:
    """Returns an output of zeros, with zero gradients, for calls without queries or keys."""
    # Products with nothing, so that gradients are zeros instead of missing.
    share = q.shape[1] // k.shape[1]
    return (q @ k.repeat_interleave(share, 1).mT) @ v.repeat_interleave(share, 1)
