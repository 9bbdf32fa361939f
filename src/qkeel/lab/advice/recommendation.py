"""The recommendation for a configuration: logits to expect, and the remedy that gains, with intervals and evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import final

from qkeel.lab.advice.law import FIRST_STEP, Expected, expected_logit, predict, sizes, summed_rates
from qkeel.lab.advice.measured import evidence, outside
from qkeel.lab.advice.read_configuration import read_configuration
from qkeel.lab.config import RunConfig
from qkeel.options import Json

THRESHOLDS = (30.0, 100.0, 1000.0)  # nats; above the last, Wortsman et al. 2023 see losses suffer
_STEPS = 5  # at which logits are said
_ENDS = tuple(map(attrgetter, ("value", "high", "low")))
_NEAREST = 2  # rows of evidence that are said where none is of the very size and rate


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemedyAdvice:
    """The expected effect of a remedy on a configuration."""

    remedy: str  #: as a spec string
    gain: Expected | None
    """Held-out loss without it minus that with it, nats per byte, with its interval for one pair of runs; None where
    unknown."""
    cost: Expected
    """Processor time with it over that without, measured apart: of `cost_of`."""
    cost_of: str
    """What that is a share of, and where the measurement stands."""
    rows: Sequence[Json]
    """The nearest measurements: sizes, rate, mean gain, its 95 % interval, seeds."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The advice for one configuration; `str` gives it in sentences, `dataclasses.asdict` as plain data."""

    outside: Sequence[str]
    """The settings outside of what the law of logits was measured on; with any, no logit is known."""
    outside_gain: Sequence[str]
    """The same for gains."""
    level: float
    """Coverage that intervals are made for, of the logits of single runs and the gains of single pairs."""
    logits: Sequence[tuple[int, Expected]]
    """The step, and the largest logit to expect then (nats)."""
    passes: Sequence[tuple[float, int | None, int | None, int | None]]
    """A logit, and the step at which it is passed: expected, earliest, latest; None for not in this run."""
    remedies: Sequence[RemedyAdvice]
    """Each remedy that was measured, the largest gain first."""

    @property
    def remedy(self) -> str | None:
        """The remedy of the largest expected gain among those whose interval lies above 0; None if there is none."""
        sure = [advice for advice in self.remedies if advice.gain and advice.gain.low > 0]
        return sure[0].remedy if sure else None

    def __str__(self) -> str:
        return "\n".join([*self._logits(), *self._remedies()])

    def _logits(self) -> list[str]:
        if self.outside:
            return [
                "logits to expect: not known, outside of what was measured:",
                *(f"  {line}" for line in self.outside),
            ]
        lines = [f"largest logit to expect (nats; interval of {self.level:.0%} of single runs):"]
        lines += [
            f"  step {step}: {_number(z.value)} ({_number(z.low)} to {_number(z.high)})" for step, z in self.logits
        ]
        for logit, step, early, late in self.passes:
            when = "not in this run" if step is None else f"at step {step}"
            span = "never" if early is None else f"from step {early} on" if late is None else f"step {early} to {late}"
            lines.append(f"  passes {logit:g}: {when} ({span})")
        return lines

    def _remedies(self) -> list[str]:
        if self.outside_gain:
            said = ["remedy: not known, outside of what gains were measured on:"]
            return said + [f"  {line}" for line in self.outside_gain]
        said = [
            f"remedy: {self.remedy or 'none: no gain is shown here'} (intervals of {self.level:.0%} of single pairs)"
        ]
        for advice in self.remedies:
            gain, cost = advice.gain, advice.cost
            if gain:
                span = f"{gain.low:+.3f} to {gain.high:+.3f}"
                said.append(f"  {advice.remedy}: gain {gain.value:+.3f} ({span}) nats per byte")
                said.append(f"    costs × {cost.value:.3f} ({cost.low:.3f} to {cost.high:.3f}) of {advice.cost_of}")
                said += [f"    measured at {_row(row)}" for row in advice.rows]
        return said


def recommend(source: RunConfig | str | Path) -> Recommendation:
    """Returns what logits to expect of a configuration, and which remedy, from runs that were measured.

    ln z = Σ coefficient · monomial of ln Σ lr and of the logarithms of sizes; the fit, its test on sizes that it never
    saw, and the coverage of its intervals are in research/results/drift-law.md; gains in research/results/gains.md.

    Args:
        source: a configuration, or a path: of a config.json of transformers or the folder with it, of a recipe, or of
            the directory of a trained or watched run.

    Raises: InvalidValueError, DataError or RunDirectoryError for what is none of these.

    >>> advice = recommend(RunConfig())
    >>> len(advice.outside), advice.logits[-1][0]
    (0, 150)
    """
    config, unknown = (source, ()) if isinstance(source, RunConfig) else read_configuration(Path(source))
    known = evidence()
    law = known["law"]
    beyond = (*unknown, *outside(config, law["boxes"]))
    gains = (*unknown, *outside(config, known["gain_boxes"]))
    sums = summed_rates(config) if not beyond else [0.0]
    course = [(step, expected_logit(config, law, sums[step])) for step in range(FIRST_STEP, len(sums))]
    advice = [_advice(config, remedy, table, known=not gains) for remedy, table in known["remedies"].items()]
    advice.sort(key=lambda one: -(one.gain.value if one.gain else 0.0))
    return Recommendation(
        outside=beyond,
        outside_gain=gains,
        level=law["level"],
        logits=[course[round(i * (len(course) - 1) / (_STEPS - 1))] for i in range(_STEPS)] if course else [],
        passes=[_passes(logit, course) for logit in THRESHOLDS] if course else [],
        remedies=advice,
    )


def _advice(config: RunConfig, remedy: str, table: Json, *, known: bool) -> RemedyAdvice:
    """Of one remedy; `known` says whether gains were measured on configurations like this one."""
    cost = Expected(**{end: table["cost"][end] for end in ("value", "low", "high")})
    of = f"{table['cost']['of']} ({table['cost']['source']})"
    gain = predict(config, table["gain"], 1.0) if known else None
    rows = sorted(table["rows"], key=lambda row: _distance(config, row))[:_NEAREST] if known else []
    rows = rows[:1] if rows and not _distance(config, rows[0]) else rows
    return RemedyAdvice(remedy=remedy, gain=gain, cost=cost, cost_of=of, rows=rows)


def _distance(config: RunConfig, row: Json) -> float:
    """Returns how many doublings of width, depth and rate lie between a configuration and a row of evidence."""
    own = sizes(config)
    return sum(
        abs(math.log2(own[letter] / row[name])) for letter, name in (("w", "width"), ("l", "depth"), ("r", "lr"))
    )


def _passes(logit: float, course: Sequence[tuple[int, Expected]]) -> tuple[float, int | None, int | None, int | None]:
    """A logit with the steps at which the expected course, its upper and its lower end pass it."""
    ends = [next((step for step, z in course if end(z) > logit), None) for end in _ENDS]
    return logit, ends[0], ends[1], ends[2]


def _row(row: Json) -> str:
    return (
        f"width {row['width']}, blocks {row['depth']}, rate {row['lr']:g}: {row['mean']:+.3f} ({row['low']:+.3f} to "
        f"{row['high']:+.3f}), {row['seeds']} seeds"
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
