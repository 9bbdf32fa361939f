"""The rule by which a number that is added to a logit hides its pair: one rule for every kind of attention call."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

HIDES = -9e3  # a number this low hides by itself; published masks start at -1e4
APART = 60.0  # nats from the lower level of a mask of smaller numbers up to the upper one; published: 100


@torch.no_grad()
def hides(added: Shaped[Tensor, ...]) -> Shaped[Tensor, ...]:
    """Returns True where a number that one call adds to its logits hides the pair.

    a <= -9000, or a lies on the lower of two levels. There are two where the numbers above -9000 fall into two groups
    with a gap of at least 60 nats between them that is wider than either group, the lower one at -60 or less. At equal
    q·k a pair of the lower level then weighs at most e⁻⁶⁰ of one of the upper level, which no sum in float64 shows. A
    bias that falls with the distance (ALiBi, T5) has a ramp of numbers and no such gap: it hides nothing.

    Args:
        added: of all rows and heads of the call, since one row may hold one level only.

    >>> hides(torch.tensor([0.3, -0.2, -99.8, -1e4])).tolist()
    [False, False, True, True]
    >>> hides(-0.5 * torch.arange(400.0)).any().item()
    False
    """
    low = added <= HIDES
    if not added.numel():
        return low
    least, most = added.masked_fill(low, torch.inf).amin(), added.masked_fill(low, -torch.inf).amax()
    # A gap that is wider than what lies on either side of it holds the middle of the whole range.
    below = ~low & (added <= (least + most) / 2)
    lower, upper = added.masked_fill(~below, -torch.inf).amax(), added.masked_fill(low | below, torch.inf).amin()
    gap = upper - lower
    # Numbers that are all alike are one level, with nothing above it.
    levels = upper.isfinite() & (gap >= APART) & (gap > lower - least) & (gap > most - upper) & (lower <= -APART)
    return low | (below & levels)


def is_low(value: object) -> bool:
    """True if a constant that replaces logits hides: no q·k is left in them, so the lower level alone decides."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and float(value.detach()) <= -APART
    return isinstance(value, (int, float)) and value <= -APART
