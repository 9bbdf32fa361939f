"""Bounds on logits and entropy from norms of q, k and their weights, without a T×T or D×D matrix."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def entropy_floor(sigma: float, n: int) -> float:
    """The smallest entropy, in nats, of a softmax row over n keys whose logits, mean removed, have L2 norm <= sigma.

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

    In nats, before a cap. Source: derived, |q·k| ≤ ‖q‖ ‖k‖ and an RMS-normed vector has norm √d.

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
    """‖q kᵀ‖_F = sqrt(Σ (qᵀq) ∘ (kᵀk)) over all pairs: two d×d Gram matrices, O(T d²).

    Times the scale it is in nats. Source: derived, tr(k qᵀ q kᵀ) = tr(qᵀq kᵀk).
    """
    return ((q.mT @ q) * (k.mT @ k)).sum((-2, -1)).clamp_min(0).sqrt()


def gram_interaction_norms(
    a: Float[Tensor, "*h d d"], b: Float[Tensor, "*h d d"]
) -> tuple[Float[Tensor, "*h"], Float[Tensor, "*h"]]:
    """Frobenius and spectral norm of W_Qᵀ W_K per head from a = W_Q W_Qᵀ and b = W_K W_Kᵀ.

    ‖·‖_F² = Σ a ∘ b; see `interaction_norm`. NaN where a or b is not finite. Source: as `logit_frobenius`.
    """
    finite = (a.isfinite() & b.isfinite()).all(-1).all(-1)
    frobenius = (a * b).sum((-2, -1)).clamp_min(0).sqrt()
    return frobenius.masked_fill(~finite, torch.nan), interaction_norm(a, b)


def interaction_norm(a: Float[Tensor, "*h d d"], b: Float[Tensor, "*h d d"]) -> Float[Tensor, "*h"]:
    """Spectral norm of W_Qᵀ W_K per head from a = W_Q W_Qᵀ and b = W_K W_Kᵀ; NaN where one is not finite.

    ‖·‖₂² = the largest eigenvalue of a b. On a CPU that is computed on the symmetric matrix Lᵀ b L with a = L Lᵀ:
    Cholesky's L, or a^½ where a is singular; elsewhere by `squared_eigenvalue`. Source: derived, (W_Qᵀ W_K)(W_Qᵀ W_K)ᵀ
    and a b have the same eigenvalues but for zeros.
    """
    if not a.is_cpu:
        return squared_eigenvalue(a, b).sqrt()
    finite = (a.isfinite() & b.isfinite()).all(-1).all(-1)
    a, b = (x.masked_fill(~finite[..., None, None], 0.0) for x in (a, b))
    root, failed = torch.linalg.cholesky_ex(a)
    if failed.any():
        values, vectors = torch.linalg.eigh(a)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    spectral = torch.linalg.eigvalsh(root.mT @ b @ root)[..., -1].clamp_min(0).sqrt()
    return spectral.masked_fill(~finite, torch.nan)


def spectral_norm(w: Float[Tensor, "*h d m"]) -> Float[Tensor, "*h"]:
    """Largest singular value σ₁ of each matrix, from the smaller Gram matrix; on a GPU by `squared_eigenvalue`."""
    return gram_spectral_norm(w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w)


def gram_spectral_norm(gram: Float[Tensor, "*h d d"]) -> Float[Tensor, "*h"]:
    """Largest singular value of W, the root of the largest eigenvalue of W Wᵀ, from that."""
    largest = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0) if gram.is_cpu else squared_eigenvalue(gram)
    return largest.sqrt()


def squared_eigenvalue(
    a: Float[Tensor, "*h d d"], b: Float[Tensor, "*h d d"] | None = None, squarings: int = 11
) -> Float[Tensor, "*h"]:
    """The largest eigenvalue λ of m = a b, both symmetric without negative eigenvalues; b None: of m = a.

    tr(mᵖ m) / tr mᵖ with p = 2^squarings, powers scaled to a trace of √d: they neither overflow nor vanish. Twelve
    products of batches of matrices and fifteen other operations: on a GPU torch solves eigenvalue problems matrix by
    matrix, and the host waits for each. What is returned is a mean of the eigenvalues with weights λᵢᵖ, so it lies in
    [λ (1 - ln d / p), λ]: at 11 squarings within 0.4 % where many eigenvalues crowd just under the largest, and exact
    where they do not; ± 4 d u tr a · tr b by rounding, u that of the dtype. 0 for a or b zero; NaN where they are not
    finite. Source: derived, a power iteration by squaring from every start at once.

    >>> a = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> round(float(squared_eigenvalue(a)), 5), round(float(squared_eigenvalue(a, torch.eye(3) / 2)), 5)
    (3.0, 1.5)
    """
    m = a if b is None else a @ b
    size = _trace(m)
    one = m / size[..., None, None]
    x = one.reshape(-1, *m.shape[-2:])
    for i in range(squarings):
        if i % 4:
            x = x @ x
        else:  # of a trace of √d the largest eigenvalue is in [1/√d, √d], its sixteenth power in [d⁻⁸, d⁸]
            x = x / _trace(x)[:, None, None] if i else x
            x = torch.baddbmm(x, x, x, beta=0, alpha=x.shape[-1])  # (√d x)²
    x = x.view_as(m)
    mean = (x * one.mT).sum((-2, -1)) / _trace(x)
    return torch.fmax(size * mean, 0 * m.sum((-2, -1)))  # a zero matrix is 0 / 0


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)
