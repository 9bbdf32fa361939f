"""Which steps to measure, and their count: every n-th step, steps evenly spaced on a log scale, or steps where the
logits change."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import final

from qkeel import distributed as dist
from qkeel.errors import InvalidTypeError, InvalidValueError, caution, check
from qkeel.patching.roles import Phase

# Nats; logits below this count as equal, because they make no difference to a softmax.
LEAST = 1.0
# Passes of a training model without a step of the optimizer, as of an optimizer that another one has replaced; fewer
# may be micro-batches.
IDLE_PASSES = 100
IDLE = (
    "the optimizer that is watched took no step in the last {} passes of the model in training mode, so nothing is "
    "recorded. If another optimizer trains the model now, close() this monitor and call qkeel.watch(model, optimizer) "
    "with that one"
)
# Records of which a cadence is told: intervals double, so that older ones cannot
# matter.
MOST_TOPS = 16


class Cadence(abc.ABC):
    """Chooses which steps are measured; it has no state, so that all processes of a run make the same choice."""

    @abc.abstractmethod
    def due(self, step: int, last: int | None, tops: Sequence[float] = ()) -> bool:
        """Returns whether step `step` is measured.

        last: the last measured step, or None before the first. tops: the largest logits at the latest measured steps,
        as far as they are known, in order; empty if several processes train, which must all make the same choice.
        """


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Every(Cadence):
    """Every n-th step, from step 0 on.

    >>> [step for step in range(7) if Every(3).due(step, None)]
    [0, 3, 6]
    """

    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise InvalidTypeError(
                f"expected a whole number of steps between two measurements, got {self.n!r}"
            )
        check(self.n >= 1, "at least 1 step between two measurements", self.n)

    def due(self, step: int, last: int | None, tops: Sequence[float] = ()) -> bool:
        return step % self.n == 0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogSpaced(Cadence):
    """`per_decade` steps for each factor of ten in steps, from step 0 on, because logit drift follows a power law,
    which is fastest at the start.

    >>> [step for step in range(101) if LogSpaced(per_decade=4).due(step, None)]
    [0, 1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    per_decade: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.per_decade, int) or self.per_decade < 1:
            raise InvalidValueError(
                f"expected at least 1 measurement per decade, got {self.per_decade!r}"
            )

    def due(self, step: int, last: int | None, tops: Sequence[float] = ()) -> bool:
        if step < 2:
            return True
        place = round(math.log10(step) * self.per_decade)
        # Rounding may have moved the step of one place nearer to that of another.
        return any(
            step == round(10 ** (p / self.per_decade))
            for p in (place - 1, place, place + 1)
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(Cadence):
    """Measures at intervals of `least` to `most` steps, short ones while the logits move.

    After k measurements in a row between which the largest logit has changed by a factor of at most 1 + `change`, the
    next interval is `least` · 2ᵏ steps, at most `most`; a larger change makes it `least` again. Values below 1 nat
    count as equal. If several processes train, which must all make the same choice, every `most`-th step is measured,
    and every `least`-th of the first `start` steps, in which logits change most.

    >>> [step for step in range(10) if Adaptive(least=2, most=9, start=6).due(step, 0)]
    [0, 2, 4, 6, 9]
    >>> [step for step in range(1, 10) if Adaptive(least=2, most=9).due(step, 0, [5.0, 5.1, 5.1])]
    [8, 9]
    """

    least: int = 5
    most: int = 100
    change: float = 0.1
    start: int = 0

    def __post_init__(self) -> None:
        check(
            1 <= self.least <= self.most,
            "1 <= least <= most",
            f"least={self.least}, most={self.most}",
        )
        check(self.change > 0, "a change above 0 (0.1 is ten per cent)", self.change)
        check(self.start >= 0, "a start of at least 0 steps", self.start)

    def due(self, step: int, last: int | None, tops: Sequence[float] = ()) -> bool:
        if last is None or step - last >= self.most:
            return True
        if step <= self.start and step % self.least == 0:
            return True
        if not tops:
            return False
        interval = self.least
        for later, earlier in zip(reversed(tops), reversed(tops[:-1])):
            if not abs(math.log(max(later, LEAST) / max(earlier, LEAST))) <= math.log1p(
                self.change
            ):
                break
            interval *= 2
        return step - last >= interval


# The default of the command line.
WHILE_LOGITS_MOVE = Adaptive(least=2, most=10, change=0.25, start=20)


def cadence(every: int | Cadence) -> Cadence:
    """`every` as a cadence: a number of steps is Every(n)."""
    return every if isinstance(every, Cadence) else Every(every)


@final
class MeasuredSteps:
    """Counts the passes and steps of a run and asks the cadence which of them are measured.

    If there is an optimizer, passes that may be trained belong to its steps. All other passes, and those in evaluation
    mode, are counted individually, separately for each model. The role of a pass is known later; see `counted`.

    Attributes:
        done: the number of optimizer steps.
        last: the last measured training step.
        reads_tops: whether the cadence may choose steps by the largest logits of others.
        closer: if not None, every so many steps are measured in addition to those that the cadence selects.
        besides: training steps that are measured regardless of the cadence.
        continued: if not None, returns the number of steps before this run; called in the first pass.
    """

    def __init__(
        self, cadence: Cadence, models: Iterable[str] = ("",), *, by_optimizer: bool
    ) -> None:
        self.done = 0
        self.last: int | None = None
        self.closer: int | None = None
        self.besides: set[int] = set()
        self.continued: Callable[[], int] | None = None
        self._cadence, self._by_optimizer = cadence, by_optimizer
        self.reads_tops = not isinstance(cadence, (Every, LogSpaced))
        self._models = tuple(models)
        self._passes: Counter[tuple[Phase, str]] = Counter()
        # By their likely roles.
        self._begun: Counter[tuple[Phase, str]] = Counter()
        self._last_untrained: dict[str, int] = {}
        # Of the model in training mode, since the last step.
        self._idle = 0
        # The largest logits at the latest measured training steps, and the latest of these steps.
        self._tops: list[float] = []
        self._recorded: int | None = None

    def due(self, model: str, may_train: bool, training: bool) -> tuple[bool, bool]:
        """Returns whether the pass that is about to start is measured, and whether this counts if it turns out to be
        trained; call it once per pass.

        may_train: whether gradients are on, so that the pass may be trained. training: the mode of the model.
        """
        # A script loads its checkpoint after `watch`, at the latest before its first pass.
        if may_train and self.continued is not None:
            self.done, self.continued = max(self.done, self.continued()), None
        likely: Phase = "train" if may_train and training else "eval"
        number = self._begun[likely, model]
        self._begun[likely, model] += 1
        self._idle += likely == "train" and self._by_optimizer
        if self._idle == IDLE_PASSES * len(self._models):
            caution(IDLE.format(IDLE_PASSES))
        counts = may_train and self._by_optimizer and self.step_due
        if likely == "eval":
            last = self._last_untrained.get(model)
            is_due = self._cadence.due(number, last)
            if is_due:
                self._last_untrained[model] = number
        else:
            is_due = not self._by_optimizer and self._is_due(number)
        return counts or is_due, counts or not self._by_optimizer

    @property
    def step_due(self) -> bool:
        """Whether the current optimizer step is measured."""
        # What has been recorded is not measured again.
        return not (self._by_optimizer and self.done == self.last) and self._is_due(
            self.done
        )

    def _is_due(self, step: int) -> bool:
        is_closer = self.closer is not None and step % self.closer == 0
        if step in self.besides or is_closer:
            return True
        return self._cadence.due(step, self.last, self._tops)

    def counted(self, model: str, phase: Phase) -> None:
        """Counts a pass whose role is known."""
        self._passes[phase, model] += 1

    def passed(self, phase: Phase) -> int:
        """Returns the total number of passes of all models."""
        return sum(self._passes[phase, model] for model in self._models)

    def rounds(self, phase: Phase) -> int:
        """Returns the smallest number of passes that any of the models has made."""
        return min(self._passes[phase, model] for model in self._models)

    @property
    def begun(self) -> int:
        """The number of passes of all models that have begun."""
        return self._begun.total()

    def recorded(self, step: int, top: float) -> None:
        """Records the largest logit of a measured training step; call it between two steps only, so that whether a step
        is measured does not change while it goes on."""
        # With several processes the others may have seen other logits, and all must make the same choice.
        if step != self._recorded and dist.world() == 1 and math.isfinite(top):
            self._recorded, self._tops = step, [*self._tops[1 - MOST_TOPS :], top]

    def measured(self, step: int) -> None:
        """Records that this training step was measured."""
        self.last = step
        self.besides.discard(step)

    def stepped(self) -> None:
        """Counts one optimizer step."""
        self.done += 1
        self._idle = 0
