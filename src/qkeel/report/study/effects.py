"""One number against another, seed by seed: how many times as large, and whether that is more than seeds differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from qkeel.report.html.formats import count, number, signed

HELD, REVERSE, NOT_SHOWN, UNDECIDED = "held", "the reverse", "not shown", "undecided"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A ratio or a difference by seed. `noise`: how far seeds are apart, as ratios are in logarithms."""

    values: Sequence[float]
    noise: float
    ratio: bool
    unit: str = "seed"

    @property
    def mean(self) -> float:
        """Over the seeds; geometric of ratios."""
        if not self.ratio:
            return math.fsum(self.values) / len(self.values)
        return math.exp(math.fsum(map(math.log, self.values)) / len(self.values))

    @property
    def verdict(self) -> str:
        """Held if it is larger than nothing by more than seeds differ, the reverse if smaller.

        >>> times({0: 2.0, 1: 2.2}, {0: 1.0, 1: 1.0}).verdict, times({0: 3.0}, {0: 1.0}).verdict
        ('held', 'undecided')
        """
        if len(self.values) < 2:
            return UNDECIDED
        size = math.log(self.mean) if self.ratio else self.mean
        if not abs(size) > self.noise:
            return NOT_SHOWN
        return HELD if size > 0 else REVERSE

    def text(self) -> str:
        """The mean with its range: 1.3× (0.9× to 1.9×, 3 seeds)."""
        low, high = min(self.values), max(self.values)
        write = _times if self.ratio else signed
        if len(self.values) == 1:
            return f"{write(self.mean)} (one seed)"
        return f"{write(self.mean)} ({write(low)} to {write(high)}, {count(len(self.values), self.unit)})"

    def said(self) -> str:
        """The verdict as the end of a sentence."""
        return {
            HELD: "held",
            REVERSE: "the reverse was seen",
            NOT_SHOWN: "inside the seed spread, not shown",
            UNDECIDED: "one seed, undecided",
        }[self.verdict]


def _times(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{number(value, 2)}×"


def times(above: Mapping[int, float], below: Mapping[int, float], *, same_run: bool = False) -> Effect | None:
    """The ratio `above` / `below` over the seeds that both have; None without any. The noise is the range of the
    ratio over the seeds, and unless both numbers are of one run, also that of either."""
    seeds = [s for s in sorted(above.keys() & below.keys()) if _positive(above[s]) and _positive(below[s])]
    if not seeds:
        return None
    logs = [math.log(above[s] / below[s]) for s in seeds]
    sides = [] if same_run else [[math.log(side[s]) for s in seeds] for side in (above, below)]
    return Effect(values=[math.exp(x) for x in logs], noise=max(map(_range, [logs, *sides])), ratio=True)


def less(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Effect | None:
    """The difference `theirs` - `mine` over the seeds that both have; None without any."""
    seeds = [s for s in sorted(mine.keys() & theirs.keys()) if math.isfinite(mine[s]) and math.isfinite(theirs[s])]
    if not seeds:
        return None
    values = [theirs[s] - mine[s] for s in seeds]
    noise = max(map(_range, [values, [mine[s] for s in seeds], [theirs[s] for s in seeds]]))
    return Effect(values=values, noise=noise, ratio=False)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
