"""Numbers of a run that claims read and no table has, each made of the run's records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qkeel.lab import RunConfig, RunDirectory, learning_rate


def logit_change(run: RunDirectory) -> float:
    """The largest root mean square change of the logits by one step, of the steps that are recorded."""
    return max(
        line["logit_change"]
        for line in run.metrics()
        if line["logit_change"] is not None
    )


def fit(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns R² of the line through points: the share of the variance of y that it explains.

    >>> round(fit([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]), 6)
    1.0
    """
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def growth(run: RunDirectory) -> tuple[list[int], list[float], list[float]]:
    """Steps, the sum of the learning rates up to each, and the logarithm of the largest logit there."""
    config = RunConfig.from_dict(run.config())
    lines = [
        line
        for line in run.metrics()
        if line["step"] and 0 < line["max_logit"] < math.inf
    ]
    steps = [line["step"] for line in lines]
    summed = np.cumsum(
        [
            learning_rate(config.optim, step, config.steps)
            for step in range(config.steps)
        ]
    )
    return (
        steps,
        [float(summed[step - 1]) for step in steps],
        [math.log(line["max_logit"]) for line in lines],
    )


def power_law(run: RunDirectory) -> float:
    """R² of ln z against ln Σlr, z the largest logit."""
    _, rates, logs = growth(run)
    return fit([math.log(x) for x in rates], logs)


def exponential(run: RunDirectory) -> float:
    """R² of ln z against steps."""
    steps, _, logs = growth(run)
    return fit(steps, logs)


def exponential_in_rates(run: RunDirectory) -> float:
    """R² of ln z against Σlr."""
    _, rates, logs = growth(run)
    return fit(rates, logs)


def factors(run: RunDirectory) -> tuple[float, float]:
    """The growth over training of |q||k|, mean norms, and of logit / |q||k| in the head with the largest logit."""
    heads = run.heads().values
    norms = heads["query_norm"] * heads["key_norm"]
    at = np.unravel_index(
        np.nanargmax(heads["max_logit"][-1]), heads["max_logit"].shape[1:]
    )
    first, last = norms[0][at], norms[-1][at]
    angles = heads["max_logit"][-1][at] / last, heads["max_logit"][0][at] / first
    return float(last / first), float(angles[0] / angles[1])


def loss_rise(run: RunDirectory) -> float:
    """Held-out loss at the end less that after a third of the steps."""
    lines = [line for line in run.metrics() if line["val_loss"] is not None]
    third = next(line for line in lines if 3 * line["step"] >= lines[-1]["step"])
    return lines[-1]["val_loss"] - third["val_loss"]


def between(
    column: str, classes: str = "image/text"
) -> Callable[[RunDirectory], float]:
    """A measure: the number of one class of tokens over that of the other, at the end of training."""
    above, below = classes.split("/")
    return lambda run: (
        run.summary()[f"{column}/{above}"] / run.summary()[f"{column}/{below}"]
    )


MEASURES: Mapping[str, Callable[[RunDirectory], Any]] = {
    "logit_change": logit_change,
    "power_law": power_law,
    "exponential": exponential,
    "exponential_in_rates": exponential_in_rates,
    "norm_factor": lambda run: factors(run)[0],
    "angle_factor": lambda run: factors(run)[1],
    "loss_rise": loss_rise,
    "query_ratio": between("query_norm"),
    "key_ratio": between("key_norm"),
}
