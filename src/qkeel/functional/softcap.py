"""Soft capping of logits."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import InvalidValueError


def softcap(z: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """Returns cap · tanh(z / cap): monotone, |result| <= cap, near the identity for |z| << cap.

    Source: Gemma 2 (arXiv 2408.00118), section 2; Bello et al. 2016 before it.

    Raises:
        InvalidValueError: the cap is not above 0.

    >>> softcap(torch.tensor([10.0, 500.0]), 50.0)
    tensor([ 9.8688, 50.0000])
    """
    if not cap > 0:
        raise InvalidValueError(f"expected a cap above 0, got {cap}")
    if math.isinf(cap):  # neutral; the formula would make it ∞ · 0
        return z
    return cap * torch.tanh(z / cap)
