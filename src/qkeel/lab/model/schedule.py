"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from qkeel.lab.config import OptimConfig

DECAY_SHARE = (
    0.2  # of the steps, for "wsd": Hu et al. 2024 (MiniCPM, arXiv 2404.06395) decay over the last tenth or fifth
)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then constant, cosine or wsd.

    >>> [round(learning_rate(OptimConfig(lr=1.0, warmup=0.5, schedule="constant"), s, 4), 3) for s in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    warm = round(config.warmup * steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        done = (step - warm) / max(1, steps - warm)
        return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done)))
    fall = max(1, min(round(DECAY_SHARE * steps), steps - warm))
    done = max(0.0, (step - (steps - fall)) / fall)
    return config.lr * (1 - (1 - config.final) * done)
