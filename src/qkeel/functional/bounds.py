"""Bounds on logits and entropy from norms of q, k and their weights, without a T×T or D×D matrix."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def entropy_floor(sigma: float, n: int) -> float:
    """The smallest entropy of a softmax row over n keys whose logits, mean removed, have L2 norm <= sigma.

    With β = exp(-σ √(n/(n-1))):  ln(1 + (n-1) β) + σ √(n (n-1)) β / (1 + (n-1) β). Tight.

    Source: Zhai et al. 2023, arXiv 2303.06296, theorem 3.1.

    >>> round(entropy_floor(5.0, 64), 6)
    1.802616
    """
    if n < 2:
        return 0.0
    beta = math.exp(-sigma * math.sqrt(n / (n - 1)))
    return math.log1p((n - 1) * beta) + sigma * math.sqrt(n * (n - 1)) * beta / (1 + (n - 1) * beta)


def rms_logit_bound(head_dim: int, gain: float = 1.0) -> float:
    """√d · gain: the largest |q·k|/√d of RMS-normed q and k whose gains multiply to at most `gain` per dimension.

    >>> round(rms_logit_bound(128), 6)
    11.313708
    """
    return math.sqrt(head_dim) * gain


def dilution_bound(logit: Tensor, n: int) -> Tensor:
    """The weight of the best of n keys, at `logit`, where the others' logits are N(0, 1): c ↦ e^c / (e^c + (n-1) √e).

    With the largest logit that a head can reach as c it bounds the weight that it can give one key among n: √d for
    gain-free RMS-normed q and k, λ for cosine attention.

    Args:
        logit: c, of any shape. n: keys, at least 1.

    Returns: shares in (0, 1], of the same shape.

    Source: the arithmetic behind what Yang et al. 2025, arXiv 2501.18795, report of QK-norm: logits too close together.

    >>> [round(float(dilution_bound(torch.tensor(8.0), n)), 2) for n in (512, 4096)]
    [0.78, 0.31]
    """
    return torch.sigmoid(logit - 0.5 - math.log(n - 1)) if n > 1 else torch.ones_like(logit)


def logit_frobenius(q: Float[Tensor, "*b t d"], k: Float[Tensor, "*b s d"]) -> Float[Tensor, "*b"]:
    """‖q kᵀ‖_F = sqrt(Σ (qᵀq) ∘ (kᵀk)): two d×d Gram matrices, O(T d²)."""
    return ((q.mT @ q) * (k.mT @ k)).sum((-2, -1)).clamp_min(0).sqrt()


def gram_interaction_norms(
    a: Float[Tensor, "*h d d"], b: Float[Tensor, "*h d d"]
) -> tuple[Float[Tensor, "*h"], Float[Tensor, "*h"]]:
    """Frobenius and spectral norm of W_Qᵀ W_K per head from a = W_Q W_Qᵀ and b = W_K W_Kᵀ.

    ‖·‖_F² = Σ a ∘ b; ‖·‖₂² = the largest eigenvalue of a b. On a CPU that is computed on the symmetric matrix Lᵀ b L
    with a = L Lᵀ: Cholesky's L, or a^½ where a is singular; elsewhere by `squared_eigenvalue`. NaN where a or b is not
    finite.
    """
    finite = (a.isfinite() & b.isfinite()).all(-1).all(-1)
    frobenius = (a * b).sum((-2, -1)).clamp_min(0).sqrt()
    if not a.is_cpu:
        return frobenius.masked_fill(~finite, torch.nan), squared_eigenvalue(a, b).sqrt().masked_fill(
            ~finite, torch.nan
        )
    a, b = (x.masked_fill(~finite[..., None, None], 0.0) for x in (a, b))
    root, failed = torch.linalg.cholesky_ex(a)
    if failed.any():
        values, vectors = torch.linalg.eigh(a)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    spectral = torch.linalg.eigvalsh(root.mT @ b @ root)[..., -1].clamp_min(0).sqrt()
    return frobenius.masked_fill(~finite, torch.nan), spectral.masked_fill(~finite, torch.nan)


def spectral_norm(w: Float[Tensor, "*h d m"]) -> Float[Tensor, "*h"]:
    """Largest singular value of each matrix, from the smaller Gram matrix; on a GPU by `squared_eigenvalue`."""
    return gram_spectral_norm(w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w)


def gram_spectral_norm(gram: Float[Tensor, "*h d d"]) -> Float[Tensor, "*h"]:
    """Largest singular value of W from W Wᵀ."""
    largest = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0) if gram.is_cpu else squared_eigenvalue(gram)
    return largest.sqrt()


def squared_eigenvalue(
    a: Float[Tensor, "*h d d"], b: Float[Tensor, "*h d d"] | None = None, squarings: int = 10
) -> Float[Tensor, "*h"]:
    """The largest eigenvalue λ of a b, both symmetric without negative eigenvalues; b None: of a.

    X = (a b)^p, p = 2^squarings, scaled so that it neither overflows nor vanishes; then the largest Rayleigh quotient
    xᵀ b a b x / xᵀ b x of its columns x. Products of batches of matrices only: on a GPU torch solves eigenvalue
    problems matrix by matrix, and the host waits for each. What is returned lies in
    [λ (1 - ln(tr a · tr b / λ) / 2p), λ], for b None in [λ (1 - ln d / 2p), λ]: at 10 squarings within 0.8 % where many
    eigenvalues crowd just under the largest, and exact where they do not; ± 4 d u tr a · tr b by rounding, u that of
    the dtype. 0 for a or b zero; NaN where they are not finite.

    >>> a = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> round(float(squared_eigenvalue(a)), 5), round(float(squared_eigenvalue(a, torch.eye(3) / 2)), 5)
    (3.0, 1.5)
    """
    a, size = _of_size_one(a)
    x, scale = a, None
    if b is not None:
        b, other = _of_size_one(b)
        size = size * other
        # A similar matrix whose rows and columns are of one size, where those of a shrink and those of b grow.
        grow, shrink = (m.diagonal(dim1=-2, dim2=-1).clamp_min(1e-20) for m in (b, a))
        scale = (grow / shrink).pow(0.25)[..., None]
        x = scale * (a @ b) / scale.mT
    for i in range(squarings):
        if i % 2 == 0:
            x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        x = x @ x
    x = x if scale is None else x / scale
    y = x if b is None else b @ x
    quotients = torch.linalg.vecdot(y, a @ y, dim=-2) / torch.linalg.vecdot(x, y, dim=-2)
    # A column of zeros is 0 / 0, as all are of a zero matrix; that a matrix is not finite its size says.
    return size * quotients.nan_to_num(0.0).amax(-1).clamp_min(0)


def _of_size_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices whose largest number is 1, and what they were divided by."""
    size = torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1))
    return x / size.clamp_min(torch.finfo(x.dtype).tiny)[..., None, None], size
