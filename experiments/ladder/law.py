"""The law of logit growth: the largest logit of a run as a function of its sizes and summed learning rates."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from experiments.files import read_json
from qkeel.lab import RunConfig, learning_rate

# Each variable is divided by the middle of the measured range before taking its logarithm.
MIDDLE = {"w": 64.0, "l": 2.0, "d": 16.0, "b": 8.0, "r": 0.03}
FIRST_STEP = 10  # before this step, the logits still have their values at initialisation
Law = dict[str, Any]  # a fit from evidence.json: coefficients, fitted, rates, half_widths


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A value expected for a single run, with an interval."""

    value: float  #: the expected value; on a logarithmic scale, the exponential of the middle
    low: float  #: the lower end of the interval
    high: float  #: the upper end of the interval


def sizes(config: RunConfig) -> dict[str, float]:
    """Returns the law's variables w, l, d, b and r: width, number of blocks, head size, batch size and peak rate."""
    model = config.model
    head = model.head_dim or model.d_model / model.n_heads
    return {"w": model.d_model, "l": model.n_layers, "d": head, "b": config.data.batch, "r": config.optim.lr}


def summed_rates(config: RunConfig) -> list[float]:
    """Returns the sum of learning rates after 0, 1, … steps."""
    sums = [0.0]
    for step in range(config.steps):
        sums.append(sums[-1] + learning_rate(config.optim, step, config.steps))
    return sums


def monomials(config: RunConfig, names: Sequence[str], summed: float) -> list[float]:
    """Returns the value of each monomial, like "" (which is 1), "s" or "ssw", where s = ln Σ lr and all other letters
    stand for ln(size / middle of its range), with the sizes of `sizes`."""
    letters = {letter: math.log(size / MIDDLE[letter]) for letter, size in sizes(config).items()}
    letters["s"] = math.log(summed)
    return [math.prod(letters[letter] for letter in name) for name in names]


def doublings(config: RunConfig, fitted: Mapping[str, Sequence[float]]) -> float:
    """Returns by how many doublings, summed over all axes, a configuration lies outside the fitted sizes."""
    spans = [(size, fitted[letter]) for letter, size in sizes(config).items() if letter in fitted]
    return sum(max(0.0, math.log2(low / size), math.log2(size / high)) for size, (low, high) in spans)


def band(config: RunConfig, law: Law) -> int:
    """Returns the index of the band of peak rates in which the configuration lies; each band has its own errors."""
    return sum(config.optim.lr > edge for edge in law["rates"])


def predict(config: RunConfig, law: Law, summed: float) -> Expected:
    """Returns Σ coefficient · monomial with an interval that widens with each doubling outside the fitted sizes.

    Args:
        config: the configuration of the run.
        law: the fit.
        summed: the sum of learning rates, Σ lr.
    """
    coefficients = law["coefficients"]
    value = sum(c * m for c, m in zip(coefficients.values(), monomials(config, list(coefficients), summed)))
    inside, outside = law["half_widths"][band(config, law)]
    half = inside + max(0.0, outside - inside) * doublings(config, law["fitted"])
    return Expected(value=value, low=value - half, high=value + half)


def expected_logit(config: RunConfig, law: Law, summed: float) -> Expected:
    """Returns the expected largest logit (nats, over layers and heads) when the learning rates sum to `summed`."""
    log = predict(config, law, summed)
    return Expected(value=math.exp(log.value), low=math.exp(log.low), high=math.exp(log.high))


# The measurements to which the law was fitted.

EVIDENCE = Path(__file__).with_name("evidence.json")  # fitted at commit c5b7e68e; notes/results/drift-law.md says how


@functools.cache
def evidence() -> dict[str, Any]:
    """Returns the measurements: the law, and the gain and cost of each remedy."""
    return read_json(EVIDENCE)
