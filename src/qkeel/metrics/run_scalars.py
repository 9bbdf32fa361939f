"""Scalars of runs: learning-rate sensitivity, collapse, spikes, errors of logits; the thresholds that logits and entropies are
judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qkeel.errors import InvalidValueError, check_known

# Rounding errors of a logit that follow from the number format of q and k, or of the stored logit itself.

# Number of fraction bits of each format.
# Fp8: e4m3.
FRACTION_BITS = {"fp8": 3, "bf16": 7, "fp16": 10, "fp32": 23}
# RMS relative error of rounding to p such bits is 2^-p · √(1/12) · √(3/(8 ln 2)): the absolute error is uniform over a
# spacing of 2^-p for m in [1, 2), and mantissas are spread evenly on a logarithmic scale (Benford).
_RELATIVE = math.sqrt(3 / (96 * math.log(2)))


def fused_logit_error(
    query_norm: float,
    key_norm: float,
    head_dim: int,
    dtype: str,
    scale: float | None = None,
) -> float:
    """Returns the standard deviation, in nats, of the error of a logit with rounded q and k: scale · √2 · r · ‖q‖ ‖k‖ /
    √d.

    This is the error of fused kernels: they accumulate in float32 but read q and k in `dtype`, each with a relative RMS
    error r. The errors of the d products are assumed to be independent, and q and k to be spread over all dimensions.

    Args:
        query_norm: ‖q‖ as it enters the product.
        key_norm: ‖k‖ as it enters the product.
        head_dim: d, the width of a head.
        dtype: one of FRACTION_BITS.
        scale: factor on q·k; 1/√d by default.

    >>> round(fused_logit_error(100.0, 100.0, 128, "bf16"), 4)
    0.1833
    """
    r = _RELATIVE * 2.0 ** -_fraction_bits(dtype)
    return (
        (head_dim**-0.5 if scale is None else scale)
        * math.sqrt(2)
        * r
        * query_norm
        * key_norm
        / math.sqrt(head_dim)
    )


def stored_logit_error(logit: float, dtype: str) -> float:
    """Returns the standard deviation, in nats, of the error of a logit stored in `dtype`: its spacing 2^(⌊log₂|z|⌋ - p)
    over √12.

    This is the error of eager attention, which writes logits to memory. Logits closer than the spacing become equal.

    >>> round(stored_logit_error(100.0, "bf16"), 4), round(stored_logit_error(1000.0, "bf16"), 4)
    (0.1443, 1.1547)
    """
    bits = _fraction_bits(dtype)
    if logit == 0 or not math.isfinite(logit):
        return 0.0 if logit == 0 else math.inf
    return 2.0 ** (math.floor(math.log2(abs(logit))) - bits) / math.sqrt(12)


def _fraction_bits(dtype: str) -> int:
    check_known("dtype", dtype, FRACTION_BITS)
    return FRACTION_BITS[dtype]


# Scalars of recorded runs: LR sensitivity, collapse, spikes, alarms.

# a record or a table row: numbers, text, booleans and null by name.
Row = Mapping[str, Any]
# Nats; Kimi K2's clip threshold (arXiv 2507.20534), and a reliable early sign in tiny
# models.
ALARM_THRESHOLD = 100.0
# Nats; a small model in which q and k were stretched until its logits reached 1e3 had a higher loss (Wortsman et al. 2023,
# arXiv 2309.14322)
HARMFUL_LOGIT = 1000.0
# Nats per query row, mean over the model.
COLLAPSE_ENTROPY = 0.1


def lr_sensitivity(losses: Sequence[float], init_loss: float = math.inf) -> float:
    """Returns the mean over learning rates of min(loss, init_loss) - min(losses).

    With `init_loss` = infinity (the default), losses are not clipped, so every loss must be finite.
    NaN counts as `init_loss`.

    Source: Wortsman et al. 2023, arXiv 2309.14322, section 2.1 (they clip at the loss at initialisation).

    Raises:
        InvalidValueError: `losses` is empty.

    >>> round(lr_sensitivity([3.5, 3.3, 3.2, 3.25, 3.6, 9.0, math.inf], math.log(32101)), 6)
    1.975235
    """
    if not losses:
        raise InvalidValueError("LR sensitivity needs at least one loss, got none")
    clipped = [
        init_loss if math.isnan(loss) else min(loss, init_loss) for loss in losses
    ]
    best = min(clipped)
    if not math.isfinite(best):
        return math.nan
    return sum(loss - best for loss in clipped) / len(clipped)


def collapsed(entropy: float, val_loss: float, init_loss: float) -> bool:
    """Returns whether attention has collapsed: mean entropy below 0.1 nats, or a loss that is NaN or did not improve.

    Tiny models rarely diverge to NaN; instead, their attention collapses to one-hot weights, whose entropy is 0.

    >>> collapsed(0.01, 2.0, 5.5), collapsed(1.2, 2.0, 5.5)
    (True, False)
    """
    # In these forms a loss or an entropy of NaN counts as collapsed.
    return not val_loss < init_loss or not entropy >= COLLAPSE_ENTROPY


def alarm_step(
    records: Sequence[Row], threshold: float = ALARM_THRESHOLD
) -> int | None:
    """Returns the first logged step with max_logit above `threshold` (NaN counts as above), or None.

    >>> alarm_step([{"step": 0, "max_logit": 8.0}, {"step": 10, "max_logit": 180.0}])
    10
    """
    for record in records:
        value = record.get("max_logit")
        if value is not None and not value <= threshold:
            return int(record["step"])
    return None


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the least-squares slope through points [n]; NaN if all x are equal.

    >>> slope(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 5.0]))
    2.0
    """
    x = x - x.mean()
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else math.nan
