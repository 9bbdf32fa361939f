"""Errors of a logit that follow from the number format: of its factors, and of its own storage."""

from __future__ import annotations

import math

from qkeel.errors import check_known

# Bits behind the binary point of a number in [1, 2).
FRACTION_BITS = {"fp8": 3, "bf16": 7, "fp16": 10, "fp32": 23}  # fp8: e4m3
# RMS relative error of rounding to p such bits is 2^-p · √(1/12) · √(3/(8 ln 2)): the absolute error is uniform over a
# spacing of 2^-p for m in [1, 2), and mantissas are spread evenly on a logarithmic scale (Benford).
_RELATIVE = math.sqrt(3 / (96 * math.log(2)))


def fused_logit_error(
    query_norm: float, key_norm: float, head_dim: int, dtype: str, scale: float | None = None
) -> float:
    """Returns the standard deviation, in nats, of a logit whose q and k were rounded: scale · √2 · r · ‖q‖ ‖k‖ / √d.

    This is the error of fused kernels: they sum in float32, but read q and k in `dtype` with relative RMS error r
    each; the d products' errors are independent, and q, k spread over the dimensions.

    Args:
        query_norm, key_norm: ‖q‖ and ‖k‖ as they enter the product.
        head_dim: d.
        dtype: one of FRACTION_BITS.
        scale: the factor of q·k; 1/√d if not given.

    >>> round(fused_logit_error(100.0, 100.0, 128, "bf16"), 4)
    0.1833
    """
    r = _RELATIVE * 2.0 ** -_fraction_bits(dtype)
    return (head_dim**-0.5 if scale is None else scale) * math.sqrt(2) * r * query_norm * key_norm / math.sqrt(head_dim)


def stored_logit_error(logit: float, dtype: str) -> float:
    """Returns the standard deviation, in nats, of a logit stored in `dtype`: its spacing 2^(⌊log₂|z|⌋ - p) over √12.

    This is the error of eager attention, which writes scores to memory. Logits closer than the spacing become equal.

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
