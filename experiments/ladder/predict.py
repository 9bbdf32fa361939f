"""The statement value = a + b · ln N: what rungs below say of the next one, before it is run.

Each value of a rung is a + b · ln(N / N₀) + e + s, with e the scatter of rungs around the line and s the mean of the
seeds' errors. a is unknown, b has a prior around 0, and both deviations are given (see `Question`), so the prediction
is the posterior of a linear model with Gaussian errors, in closed form.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.ladder.law import evidence, expected_logit, predict, summed_rates
from experiments.ladder.plan import FIRST_SEED, LEVEL, QUESTIONS, RUNGS, Question
from experiments.ladder.rows import Row, values

WIDE = 10.0  # standard deviation of a: nothing is known of it
LEAST = 0.003  # nats: no seeds are trusted to agree better than this
Z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is expected of a rung's mean over its seeds, with its interval at LEVEL, and where it comes from."""

    value: float
    low: float
    high: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The posterior of a and b."""

    mean: np.ndarray
    covariance: np.ndarray
    spread: float
    """Standard deviation of seeds, pooled over the rungs below."""


def place(rung: str) -> float:
    """ln N, from the first rung on."""
    return math.log(RUNGS[rung].parameters / RUNGS["0.13M"].parameters)


def line(question: Question, known: Mapping[str, Sequence[float]]) -> Line:
    """The line through what is known: values by seed of the rungs below."""
    groups = [np.asarray(v) for v in known.values() if len(v)]
    free = sum(len(v) - 1 for v in groups)
    pooled = math.sqrt(sum(float(((v - v.mean()) ** 2).sum()) for v in groups) / free) if free else question.scatter
    spread = max(pooled, LEAST)
    precision = np.diag([WIDE**-2, question.slope**-2])
    sums = np.zeros(2)
    for rung, own in known.items():
        if len(own):
            x = np.array([1.0, place(rung)])
            weight = 1 / (question.scatter**2 + spread**2 / len(own))
            precision += weight * np.outer(x, x)
            sums += weight * float(np.mean(own)) * x
    covariance = np.linalg.inv(precision)
    return Line(mean=covariance @ sums, covariance=covariance, spread=spread)


def next_rung(question: Question, known: Mapping[str, Sequence[float]], rung: str) -> Predicted:
    """The prediction of a rung's mean from the rungs below."""
    found, x = line(question, known), np.array([1.0, place(rung)])
    variance = float(x @ found.covariance @ x) + question.scatter**2 + found.spread**2 / RUNGS[rung].seeds
    value, half = float(x @ found.mean), Z * math.sqrt(variance)
    return Predicted(value=value, low=value - half, high=value + half, source="line")


def frozen_logit(arm_rate: float, rung: str) -> Predicted:
    """The frozen law's prediction of ln z of a run without a remedy at its end, as the package carries it."""
    config = RUNGS[rung].config("none", arm_rate, FIRST_SEED)
    z = expected_logit(config, evidence()["law"], summed_rates(config)[-1])
    return Predicted(value=math.log(z.value), low=math.log(z.low), high=math.log(z.high), source="frozen law")


def frozen_gain(question: Question, rung: str) -> Predicted | None:
    """The frozen law of gains on the question, where it has one: less the gain of the arm over none. Its interval is
    for one pair of runs, so it is too wide for a mean over seeds."""
    spelled = {"qk_norm": "qk_norm", "lalr": "lalr:tau=0.1", "qk_clip": "qk_clip:threshold=30"}.get(question.left)
    rate = RUNGS[rung].roles.get(question.role)
    if spelled is None or question.right != "none" or rate is None:
        return None
    config = RUNGS[rung].config("none", rate, FIRST_SEED)
    gain = predict(config, evidence()["remedies"][spelled]["gain"], 1.0)
    return Predicted(value=-gain.value, low=-gain.high, high=-gain.low, source="frozen law")


def predictions(rung: str, below: Mapping[str, Sequence[Row]]) -> dict[str, list[Predicted]]:
    """By question what was expected of a rung: by the frozen laws, and by the line where a rung lies below."""
    found: dict[str, list[Predicted]] = {}
    for question in QUESTIONS:
        rate = RUNGS[rung].roles.get(question.role)
        if rate is None:
            continue
        known = {name: list(values(question, name, rows).values()) for name, rows in below.items()}
        own = [frozen_logit(rate, rung)] if question.logits else [p for p in [frozen_gain(question, rung)] if p]
        found[question.name] = own + ([next_rung(question, known, rung)] if any(known.values()) else [])
    return found


def frozen_laws() -> dict[str, dict[str, dict[str, object]]]:
    """What the frozen laws say of every rung and question: they read no run of the ladder."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for rung in RUNGS:
        own = {name: said[0] for name, said in predictions(rung, {}).items() if said}
        found[rung] = {name: dataclasses.asdict(said) for name, said in own.items()}
    return found
