"""Losses on output logits."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def z_loss(logits: Float[Tensor, "*batch vocab"], coefficient: float = 1e-4) -> Float[Tensor, ""]:
    """Returns coefficient · mean((ln Σ e^logit)²): keeps the output logits' normaliser near 1.

    The logsumexp is squared (at least one public codebase adds it unsquared, which is another loss).

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5; Wortsman et al. 2023, arXiv 2309.14322.

    >>> z_loss(torch.zeros(3, 4), 1.0)
    tensor(1.9218)
    """
    return coefficient * torch.logsumexp(logits.float() if logits.dtype.itemsize < 4 else logits, -1).square().mean()
