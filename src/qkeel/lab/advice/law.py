"""The law of logit growth: the largest logit of a run as a function of the rates summed so far and of its sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import final

from qkeel.lab.config import RunConfig
from qkeel.lab.model.optimizers import learning_rate
from qkeel.options import Json

# What each letter of a monomial divides by before the logarithm is taken: the middle of what was measured.
MIDDLE = {"w": 64.0, "l": 2.0, "d": 16.0, "b": 8.0, "r": 0.03}
FIRST_STEP = 10  # before it a logit is that of the start
Law = Json  # a fit as the evidence has it: coefficients, fitted, rates, half_widths


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A number that is expected of a single run, with an interval."""

    value: float  #: the middle, or on a logarithmic scale its exponential
    low: float  #: lower end of the interval
    high: float  #: upper end


def sizes(config: RunConfig) -> dict[str, float]:
    """Returns what the law calls w, l, d, b and r: width, blocks, size of a head, sequences of a step, peak rate."""
    model = config.model
    head = model.head_dim or model.d_model / model.n_heads
    return {"w": model.d_model, "l": model.n_layers, "d": head, "b": config.data.batch, "r": config.optim.lr}


def summed_rates(config: RunConfig) -> list[float]:
    """Returns Σ lr over the steps done, for 0, 1, … steps."""
    sums = [0.0]
    for step in range(config.steps):
        sums.append(sums[-1] + learning_rate(config.optim, step, config.steps))
    return sums


def monomials(config: RunConfig, names: Sequence[str], summed: float) -> list[float]:
    """Returns the value of each monomial, like "" (1), "s" or "ssw"; s = ln Σ lr, the others are those of `sizes`."""
    letters = {letter: math.log(size / MIDDLE[letter]) for letter, size in sizes(config).items()}
    letters["s"] = math.log(summed)
    return [math.prod(letters[letter] for letter in name) for name in names]


def doublings(config: RunConfig, fitted: Mapping[str, Sequence[float]]) -> float:
    """Returns how many doublings a configuration lies outside of the sizes that were fitted on, of all axes summed."""
    spans = [(size, fitted[letter]) for letter, size in sizes(config).items() if letter in fitted]
    return sum(max(0.0, math.log2(low / size), math.log2(size / high)) for size, (low, high) in spans)


def band(config: RunConfig, law: Law) -> int:
    """Returns which of the bands of peak rates a configuration lies in: each has errors of its own."""
    return sum(config.optim.lr > edge for edge in law["rates"])


def predict(config: RunConfig, law: Law, summed: float) -> Expected:
    """Returns Σ coefficient · monomial with its interval, which is wider by each doubling outside of the fitted sizes.

    Args:
        config: the run. law: the fit. summed: Σ lr.
    """
    coefficients = law["coefficients"]
    value = sum(c * m for c, m in zip(coefficients.values(), monomials(config, list(coefficients), summed)))
    inside, outside = law["half_widths"][band(config, law)]
    half = inside + max(0.0, outside - inside) * doublings(config, law["fitted"])
    return Expected(value=value, low=value - half, high=value + half)


def expected_logit(config: RunConfig, law: Law, summed: float) -> Expected:
    """Returns the largest logit (nats, over layers, heads and probe) to expect once the rates have summed to `summed`:
    the law is one of its logarithm.
    """
    log = predict(config, law, summed)
    return Expected(value=math.exp(log.value), low=math.exp(log.low), high=math.exp(log.high))
