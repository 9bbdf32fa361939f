"""Measured orders of kernels: this machine's own table where it has one, else a default one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import final

import torch

from qkeel.kernels.choice.question import TOKENS, Form, Question, Statistics
from qkeel.kernels.choice.stored import adopted

Order = tuple[str, ...]  # names of kernels, the fastest first
Steps = tuple[tuple[int | None, Order], ...]  # up to so many query tokens, this order; None: any number


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An order for the questions that it names; None: any."""

    order: Order
    device: str | None = None
    vectors: str | None = None  # torch.backends.cpu.get_cpu_capability()
    dtypes: tuple[torch.dtype, ...] | None = None
    form: Form | None = None
    gradient: bool | None = None
    statistics: Statistics | None = None
    least: int = 1
    most: float = math.inf

    def holds(self, asked: Question, tokens: int) -> bool:
        """Whether it says something about so many query tokens."""
        device, dtype, _, form, gradient, statistics = asked
        here = torch.backends.cpu.get_cpu_capability()
        pairs = ((self.device, device.type), (self.vectors, here), (self.form, form))
        pairs += ((self.gradient, gradient), (self.statistics, statistics))
        fits = self.dtypes is None or dtype in self.dtypes
        return fits and self.least <= tokens <= self.most and all(mine in (None, theirs) for mine, theirs in pairs)


_HALF = (torch.bfloat16, torch.float16)
# Where the order of qkeel.ops.KERNELS is not the fastest (`qkeel bench --size full`); the first rule that holds counts.
DEFAULT: tuple[Rule, ...] = (
    # One query: the compiled attention takes 1.8 to 2.3 times SDPA's time, 1.3 times the chunked kernel's.
    Rule(order=("sdpa", "chunked", "native"), device="cpu", most=1),
    # Forward and backward by torch's flash kernel takes 4.0 to 7.1 times the chunked one's time in half precision on a
    # processor without units for it; windowed, which is made of it, 2.3 to 3.5 times. Table: docs/choice.md.
    Rule(order=("native", "chunked", "sdpa", "windowed"), device="cpu", vectors="AVX2", dtypes=_HALF, gradient=True),
)


def steps(asked: Question) -> Steps:
    """What is known of a question, by number of query tokens; () where nothing is."""
    measured = adopted().get((asked[0].type, *asked[1:]), {})
    found: list[tuple[int | None, Order]] = []
    for tokens in TOKENS:
        order = measured.get(tokens) or next((r.order for r in DEFAULT if r.holds(asked, tokens)), ())
        if found and found[-1][1] == order:
            found.pop()
        found.append((tokens, order))
    return (*found[:-1], (None, found[-1][1]))


def ordered(measured: Order, names: Sequence[str]) -> Order:
    """All names, the measured ones in measured order; one that was not measured keeps its place.

    >>> ordered(("c", "a"), ["a", "b", "c", "d"])
    ('c', 'b', 'a', 'd')
    """
    known = iter([name for name in measured if name in names])
    return tuple(next(known) if name in measured else name for name in names)
