"""The steps to measure: every n-th step, at steps spread evenly over their logarithm, or when the logits change."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, final

from qkeel.errors import InvalidTypeError, InvalidValueError


class Cadence(abc.ABC):
    """The choice of measured steps, without state, so that all processes of a run decide the same."""

    brackets: ClassVar[bool] = False  # whether it wants the bound on the largest logit at every step

    @abc.abstractmethod
    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        """Returns whether step `step` is measured.

        last: the step measured last, None at the first. bound_ratio: by which factor the bound on the largest logit has
        risen or fallen since (1 where it is not known).
        """


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Every(Cadence):
    """Every n-th step, from step 0 on.

    >>> [step for step in range(7) if Every(3).due(step, None, 1.0)]
    [0, 3, 6]
    """

    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise InvalidTypeError(f"expected a whole number of steps between two measurements, got {self.n!r}")
        if self.n < 1:
            raise InvalidValueError(f"expected at least 1 step between two measurements, got {self.n}")

    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        return step % self.n == 0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogSpaced(Cadence):
    """`per_decade` steps for each tenfold of steps, from step 0 on: a drift is a power law, and its start is fast.

    >>> [step for step in range(101) if LogSpaced(per_decade=4).due(step, None, 1.0)]
    [0, 1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    per_decade: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.per_decade, int) or self.per_decade < 1:
            raise InvalidValueError(f"expected at least 1 measurement per decade, got {self.per_decade!r}")

    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        if step < 2:
            return True
        place = round(math.log10(step) * self.per_decade)
        return any(step == round(10 ** (p / self.per_decade)) for p in (place - 1, place, place + 1))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(Cadence):
    """At most every `least` steps, at least every `most`, in between when the bound on the largest logit has changed.

    The bound is the largest row logsumexp, lse - ln n <= max <= lse, which torch's fused CPU kernel computes anyway;
    where there is none (dropout, a GPU) scale·max|q|·max|k|, and of hand-written attention the maximum itself. Changed
    means by a factor of more than 1 + `change` since the first step after the last measurement. Compiled models
    are not read between measurements, and several processes must decide alike: there it is every `most` steps.
    """

    least: int = 5
    most: int = 100
    change: float = 0.1
    brackets = True

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InvalidValueError(f"expected 1 <= least <= most, got least={self.least}, most={self.most}")
        if not self.change > 0:
            raise InvalidValueError(f"expected a change above 0 (0.1 is ten per cent), got {self.change}")

    def due(self, step: int, last: int | None, bound_ratio: float) -> bool:
        if last is None or step - last >= self.most:
            return True
        return step - last >= self.least and abs(math.log(bound_ratio)) > math.log1p(self.change)


def cadence(every: int | Cadence) -> Cadence:
    """`every` as a cadence: a number of steps is Every(n)."""
    return every if isinstance(every, Cadence) else Every(every)
