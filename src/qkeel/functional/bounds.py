"""Bounds on logits from norms of activations and weights; formulas on weights (spectral norms, Newton–Schulz, QK-clip's γ);
the change made by a step.

Shapes: b batch, t queries, s keys, h heads, d dimensions per head, m and n widths of weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.functional.norms import widest
from qkeel.functional.statistics import PerHead, VisibleKeys

PerMatrix = Float[Tensor, "*h"]
Grams = Float[Tensor, "*h d d"]
# Of a product leftᵀ right.
Left = Float[Tensor, "*h r m"]
Right = Float[Tensor, "*h r n"]

# Bounds on logits and entropy from norms of q, k and their weights, without a T×T or D×D matrix.


def entropy_floor(sigma: float, n: int) -> float:
    """Returns the smallest entropy, in nats, of a softmax over n keys whose centred logits have L2 norm <= sigma.

    With β = exp(-σ √(n/(n-1))), it is ln(1 + (n-1) β) + σ √(n (n-1)) β / (1 + (n-1) β), a tight bound.

    Source: Zhai et al. 2023, arXiv 2303.06296, theorem 3.1.

    >>> round(entropy_floor(5.0, 64), 6)
    1.802616
    """
    if n < 2:
        return 0.0
    beta = math.exp(-sigma * math.sqrt(n / (n - 1)))
    return math.log1p((n - 1) * beta) + sigma * math.sqrt(n * (n - 1)) * beta / (
        1 + (n - 1) * beta
    )


def rms_logit_bound(head_dim: int, gain: float = 1.0) -> float:
    """Returns √d · gain, the largest |q·k|/√d of RMS-normed q and k whose gains multiply to at most `gain`.

    The bound is in nats, before a cap. Source: derived; |q·k| ≤ ‖q‖ ‖k‖, and an RMS-normed vector has norm √d.

    >>> round(rms_logit_bound(128), 6)
    11.313708
    """
    return math.sqrt(head_dim) * gain


def logit_frobenius(
    q: Float[Tensor, "*b t d"], k: Float[Tensor, "*b s d"]
) -> Float[Tensor, "*b"]:
    """Returns ‖q kᵀ‖_F = sqrt(Σ (qᵀq) ∘ (kᵀk)) over all pairs, from two d×d Gram matrices in O(T d²).

    Multiply the result by the scale to obtain nats. Source: derived; tr(k qᵀ q kᵀ) = tr(qᵀq kᵀk).

    >>> q, k = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2)
    >>> round(logit_frobenius(q, k).item() ** 2, 3)  # 1² + 2²
    5.0
    """
    return ((q.mT @ q) * (k.mT @ k)).sum((-2, -1)).clamp_min(0).sqrt()


def gram_interaction_norms(a: Grams, b: Grams) -> tuple[PerMatrix, PerMatrix]:
    """Returns the Frobenius and spectral norms of W_Qᵀ W_K per head from a = W_Q W_Qᵀ and b = W_K W_Kᵀ.

    ‖·‖_F² = Σ a ∘ b; for the spectral norm, see `interaction_norm`. Both are NaN where a or b is not finite.
    Source: as for `logit_frobenius`.

    >>> w = torch.diag(torch.tensor([3.0, 4.0]))  # W_Q; W_K is the identity
    >>> [round(x.item(), 3) for x in gram_interaction_norms(w @ w.mT, torch.eye(2))]
    [5.0, 4.0]
    """
    finite = (a.isfinite() & b.isfinite()).all(-1).all(-1)
    frobenius = (a * b).sum((-2, -1)).clamp_min(0).sqrt()
    return frobenius.masked_fill(~finite, torch.nan), interaction_norm(a, b)


def interaction_norm(a: Grams, b: Grams) -> PerMatrix:
    """Returns the spectral norm of W_Qᵀ W_K per head, computed from a = W_Q W_Qᵀ and b = W_K W_Kᵀ; NaN if either is not
    finite.

    ‖·‖₂² is the largest eigenvalue of a b. On a CPU it is computed from the symmetric matrix Lᵀ b L with a = L Lᵀ
    (Cholesky's L; a^½ in float64 if a is singular or a product overflows); other devices use `squared_eigenvalue`.
    Source: derived; (W_Qᵀ W_K)(W_Qᵀ W_K)ᵀ and a b have the same nonzero eigenvalues.

    >>> w = torch.diag(torch.tensor([3.0, 4.0]))  # W_Q; W_K is the identity
    >>> round(interaction_norm(w @ w.mT, torch.eye(2)).item(), 3)
    4.0
    """
    if not a.is_cpu:
        return squared_eigenvalue(a, b).sqrt()
    root, failed = torch.linalg.cholesky_ex(a)
    # The latter calls five operators around the former.
    times = torch.bmm if a.ndim == 3 else torch.matmul
    product = times(times(root.mT, b), root)
    # A finite sum has finite terms only. Cholesky reads one triangle of a, so a is summed as well.
    if any(failed.flatten().tolist()) or not math.isfinite(product.sum() + a.sum()):
        return _scaled_interaction_norm(a, b)
    return torch.linalg.eigvalsh(product)[..., -1].clamp_min(0).sqrt()


def _scaled_interaction_norm(a: Grams, b: Grams) -> PerMatrix:
    """Computes `interaction_norm` for any matrices, scaled so that no product overflows and no eigensolver fails."""
    finite = (a.isfinite() & b.isfinite()).all(-1).all(-1)
    a64, b64 = (x.double().masked_fill(~finite[..., None, None], 0.0) for x in (a, b))
    size_a, size_b = (
        x.abs().amax((-2, -1)).clamp_min(torch.finfo(x.dtype).tiny) for x in (a64, b64)
    )
    values, vectors = torch.linalg.eigh(a64 / size_a[..., None, None])
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    largest = torch.linalg.eigvalsh(root.mT @ (b64 / size_b[..., None, None]) @ root)[
        ..., -1
    ].clamp_min(0)
    return (
        (largest.sqrt() * size_a.sqrt() * size_b.sqrt())
        .masked_fill(~finite, torch.nan)
        .to(a.dtype)
    )


def spectral_norm(w: Float[Tensor, "*h d m"]) -> PerMatrix:
    """Returns the largest singular value of each matrix, from the smaller Gram matrix.

    >>> round(spectral_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])).item(), 3)
    4.0
    """
    return gram_spectral_norm(w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w)


def gram_spectral_norm(gram: Grams) -> PerMatrix:
    """Returns the largest singular value of W from W Wᵀ.

    >>> round(gram_spectral_norm(torch.diag(torch.tensor([9.0, 16.0]))).item(), 3)
    4.0
    """
    largest = (
        torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
        if gram.is_cpu
        else squared_eigenvalue(gram)
    )
    return largest.sqrt()


def squared_eigenvalue(
    a: Grams,
    b: Grams | None = None,
    squarings: int = 11,
) -> PerMatrix:
    """Returns the largest eigenvalue λ of m = a b (or m = a), where a and b are symmetric and positive semidefinite.

    Computes tr(mᵖ m) / tr mᵖ with p = 2^squarings, on powers rescaled to a trace of √d so that they neither overflow
    nor vanish. Twelve batched products and fifteen other operations replace torch's GPU eigensolvers, which process one
    matrix at a time while the host waits. The result is the mean of the eigenvalues with weights λᵢᵖ, so it lies
    between λ (1 - ln d / p) and λ. With 11 squarings, it is within 0.4 % of λ if many eigenvalues lie just below the
    largest, and exact otherwise. Rounding adds ± 4 d u tr a · tr b, where u is the dtype's rounding unit. Zero matrices
    give 0, and non-finite matrices give NaN.
    Source: derived; power iteration by repeated squaring, from all starting vectors at once.

    >>> a = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> round(float(squared_eigenvalue(a)), 5), round(float(squared_eigenvalue(a, torch.eye(3) / 2)), 5)
    (3.0, 1.5)
    """
    m = a if b is None else a @ b
    size = _trace(m)
    scaled = m / size[..., None, None]
    x = scaled.reshape(-1, *m.shape[-2:])
    for i in range(squarings):
        if i % 4:
            x = x @ x
        else:  # with a trace of √d the largest eigenvalue is in [1/√d, √d], its sixteenth power in [d⁻⁸, d⁸]
            x = x / _trace(x)[:, None, None] if i else x
            # (√d x)².
            x = torch.baddbmm(x, x, x, beta=0, alpha=x.shape[-1])
    x = x.view_as(m)
    mean = (x * scaled.mT).sum((-2, -1)) / _trace(x)
    # 0 / 0 of a zero matrix becomes 0.
    return torch.fmax(size * mean, 0 * m.sum((-2, -1)))


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


# The change of W_Qᵀ W_K by a step, from factors, so that no matrix of the model's width squared is formed.


class Spectrum(NamedTuple):
    """Three summaries of a matrix's singular values σ, per head; NaN if the matrix is not finite."""

    spectral_norm: PerMatrix  #: the largest, σ₁
    stable_rank: PerMatrix  #: Σσ² / σ₁², in [1, rank]; NaN for a zero matrix
    #: -Σ p ln p, p = σ² / Σσ², in nats, in [0, ln rank]; NaN for a zero matrix
    singular_entropy: Float[Tensor, "*h"]


def small_product(a: Left, b: Right) -> Float[Tensor, "*h i j"]:
    """Returns a matrix of at most r by r with the same singular values as aᵀ b, in float64; NaN if a or b is not
    finite.

    With the thin QR factorisations aᵀ = Q_a R_a and bᵀ = Q_b R_b, aᵀ b = Q_a (R_a R_bᵀ) Q_bᵀ, so it is R_a R_bᵀ: in float64,
    without the squaring that Gram matrices would need. The host does not wait for the device.

    Args:
        a: the left factor.
        b: the right factor.

    Source: derived.

    >>> a, b = torch.ones(1, 5), torch.ones(1, 4)
    >>> round(small_product(a, b).abs().item() ** 2, 6)  # of a 5 x 4 matrix of ones
    20.0
    """
    finite, device = (
        a.isfinite().flatten(-2).all(-1) & b.isfinite().flatten(-2).all(-1),
        a.device,
    )
    if widest(device) != torch.float64:
        a, b, finite = a.cpu(), b.cpu(), finite.cpu()
    a, b = (x.double().masked_fill(~finite[..., None, None], 0.0) for x in (a, b))
    first, second = (torch.linalg.qr(x.mT, mode="r").R for x in (a, b))
    return (first @ second.mT).masked_fill(~finite[..., None, None], torch.nan)


def spectrum(product: Float[Tensor, "*h i j"]) -> Spectrum:
    """Returns the spectra of float64 matrices, such as those that `small_product` returns for many sites.

    On a GPU, the host waits only once for all matrices.

    Args:
        product: the matrices.

    Source: the definitions; see `Spectrum`.

    >>> largest, *_ = spectrum(torch.diag(torch.tensor([3.0, 4.0])).double())
    >>> round(largest.item(), 6)
    4.0
    """
    finite = product.isfinite().flatten(-2).all(-1)
    sigma = torch.linalg.svdvals(product.masked_fill(~finite[..., None, None], 0.0))
    largest = sigma[..., 0]
    # NaN of a zero matrix.
    p = (sigma / largest[..., None]).square()
    total = p.sum(-1)
    entropy = total.log() - torch.special.xlogy(p, p).sum(-1) / total
    return Spectrum(
        largest.masked_fill(~finite, torch.nan), total, entropy.clamp_min(0)
    )


def step_products(
    query: Left,
    query_step: Left,
    key: Right,
    key_step: Right,
) -> tuple[Tensor, Tensor]:
    """Returns small matrices that have the same singular values as Δ₂ and Δ₃, the changes a step makes to each head's
    W_Qᵀ W_K.

    The rows are the features of a head, so r = d_head.

    (W_Q + ΔW_Q)ᵀ (W_K + ΔW_K) = W_Qᵀ W_K + Δ₂ + Δ₃ with Δ₂ = ΔW_Qᵀ W_K + W_Qᵀ ΔW_K = [ΔW_Q; W_Q]ᵀ [W_K; ΔW_K], of rank
    at most 2 r, and Δ₃ = ΔW_Qᵀ ΔW_K.

    Args:
        query: W_Q of each head before the step.
        query_step: ΔW_Q.
        key: W_K of each head before the step.
        key_step: ΔW_K.

    Source: arXiv 2606.28116, sections 3.2 and 3.4, which writes x W where this module writes W x.

    >>> w, step = torch.eye(2), torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    >>> second, third = step_products(w, step, w, step)
    >>> [round(spectral_norm(x).item(), 6) for x in (second, third)]  # ΔᵀW + WᵀΔ, and ΔᵀΔ
    [1.0, 0.25]
    """
    second = small_product(
        torch.cat([query_step, query], -2), torch.cat([key, key_step], -2)
    )
    return second, small_product(query_step, key_step)


# Expected query norms, the spread of logits, and the size of the softmax's Jacobian.


def expected_squared_norm(
    weight: Float[Tensor, "*h d m"], sigma: float = 1.0
) -> PerMatrix:
    """Returns E‖W x‖² = σ² ‖W‖_F² for x with independent entries of mean 0 and standard deviation σ.

    Inputs with entries k times as large give queries with k times the norm. If x is normalised (RMS 1 for every token),
    σ is 1 for all inputs. Source: derived; E[x xᵀ] = σ² I.

    >>> expected_squared_norm(torch.tensor([[3.0, 4.0]]), sigma=2.0).item()
    100.0
    """
    return sigma**2 * weight.square().sum((-2, -1))


def logit_std(
    query_rms: float, key_rms: float, head_dim: int, scale: float | None = None
) -> float:
    """Returns the standard deviation scale · √d · rms(q) · rms(k), in nats, of the logits of independent q and k.

    With entries of RMS 1 and any d, it is 1 at scale 1/√d, √d at scale 1, and 1/√d at scale 1/d.

    Args:
        query_rms: RMS of the entries of queries.
        key_rms: RMS of the entries of keys.
        head_dim: d, the width of a head.
        scale: the factor on q·k; 1/√d if not given.

    Source: derived; a logit is a sum of d products, each with variance rms(q)² rms(k)².

    >>> [round(logit_std(1, 1, 64, scale), 3) for scale in (1.0, 64**-0.5, 1 / 64)]
    [8.0, 1.0, 0.125]
    """
    return (
        (head_dim**-0.5 if scale is None else scale)
        * math.sqrt(head_dim)
        * query_rms
        * key_rms
    )


def softmax_jacobian_norm(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Returns ‖diag(p) - p pᵀ‖_F = √(Σp² - 2 Σp³ + (Σp²)²), the gain of gradients through softmax rows p.

    It is 0 if one key has all the weight, √(n - 1) / n for equal weights, and at most 1/2 (two keys with half each).
    Values below about 1e-8 (float64) are rounding errors. Source: derived; Σ of the squared entries p_i (δ_ij - p_j).

    >>> softmax_jacobian_norm(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    square = weights.square().sum(-1)
    return (square - 2 * weights.pow(3).sum(-1) + square.square()).clamp_min(0).sqrt()


# Formulas applied to weights between steps: QK-Clip and Newton-Schulz. LALR's are in `remedies.lalr.HeadRates`.


def qk_clip_gamma(max_logit: PerHead, threshold: float) -> PerHead:
    """Returns γ_h = τ / S_h where S_h > τ, else exactly 1.

    S_h is the largest signed scaled logit. Maxima that are zero, negative or -inf (a head without data) give 1. So do
    NaN and +inf, because clipping by them would destroy the head's weights permanently.

    Source: Kimi K2, arXiv 2507.20534, section 2.1, equation 1.

    >>> qk_clip_gamma(torch.tensor([200.0, 100.0, -3.0, float("-inf")]), 100.0)
    tensor([0.5000, 1.0000, 1.0000, 1.0000])
    """
    over = (max_logit > threshold) & max_logit.isfinite()
    return torch.where(
        over, threshold / torch.where(over, max_logit, torch.ones_like(max_logit)), 1.0
    )


def repeat_groups(x: Float[Tensor, "g ..."], n_heads: int) -> Float[Tensor, "h ..."]:
    """Repeats each group's value for the h / g consecutive query heads that share it.

    >>> repeat_groups(torch.tensor([1.0, 2.0]), 4).tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    return x.repeat_interleave(n_heads // x.shape[0], dim=0)


def newton_schulz(
    g: Float[Tensor, "*b m n"], steps: int = 5
) -> Float[Tensor, "*b m n"]:
    """Returns an approximate orthogonal factor of g (singular values within 1 ± 0.3), in g's dtype.

    X ← aX + (b A + c A²) X with A = X Xᵀ, (a, b, c) = (3.4445, -4.7750, 2.0315), X₀ = g / (‖g‖_F + 1e-7).

    Source: Jordan 2024 (Muon); Liu et al. 2025, arXiv 2502.16982. Their code iterates in bfloat16, which CPUs without
    bfloat16 units emulate; on such CPUs, float32 is faster and no less accurate.

    >>> s = torch.linalg.svdvals(newton_schulz(torch.diag(torch.tensor([1.0, 5.0]))))
    >>> bool(((s > 0.67) & (s < 1.3)).all())
    True
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    # The iteration multiplies by the Gram matrix of the rows, which is small if these are few.
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


# The change of a fixed batch's logits by one optimizer step, per head.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitChange:
    """How much the signed logits of each query head change, before the cap and in nats, over `n_pairs` visible pairs.

    All fields are 0 if there are no pairs. The tensors are detached and in float32 or wider.
    """

    rms: PerHead  #: root mean square of the change
    n_pairs: Int[Tensor, " h"]


def change_factors(
    q: Tensor, k: Tensor, q_new: Tensor, k_new: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns factors a [b h t 2d] and c [b g s 2d] with a cᵀ = q' k'ᵀ - q kᵀ: a = [q' - q, q], c = [k', k' - k].

    The form [q' q][k' -k]ᵀ would subtract numbers as large as the logits, and a step of 1e-3 would be lost in float32.
    `logit_frobenius` of both factors is ‖q' k'ᵀ - q kᵀ‖_F.

    Args:
        q: queries [b h t d] before the step.
        k: keys [b g s d] before the step.
        q_new: queries after the step.
        k_new: keys after the step.

    Source: the product rule for differences, q'k' - qk = (q' - q)k' + q(k' - k).

    >>> q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    >>> a, c = change_factors(q, k, 2 * q, 3 * k)
    >>> (a @ c.mT).item()  # 2 · 3 · 2 - 2
    10.0
    """
    return torch.cat([q_new - q, q], dim=-1), torch.cat([k_new, k_new - k], dim=-1)


def change_rows(change: Tensor, visible_keys: VisibleKeys) -> dict[str, Tensor]:
    """Returns, for each query row of blanked changes, the root of the sum of squares and the number of visible pairs.

    >>> rows = change_rows(torch.ones(1, 1, 1, 4), VisibleKeys(None, 4, 4))
    >>> rows["norm"].item(), rows["n"].item()
    (2.0, 4)
    """
    b, h, r, _ = change.shape
    count = visible_keys.counts(r, change.device).expand(b, h, r)
    return {"norm": torch.linalg.vector_norm(change, dim=-1), "n": count}


def reduce_changes(
    parts: list[dict[str, Tensor]], counted: Bool[Tensor, "b t"] | None
) -> LogitChange:
    """Reduces the rows of all parts to one change per head; rows are counted if they see a key and are not masked
    out.

    >>> rows = change_rows(torch.ones(1, 1, 1, 4), VisibleKeys(None, 4, 4))
    >>> reduce_changes([rows], None).rms.tolist()
    [1.0]
    """
    rows = {
        name: torch.cat([block[name] for block in parts], dim=2) for name in parts[0]
    }
    out = rows["n"] == 0 if counted is None else (rows["n"] == 0) | ~counted[:, None]
    norm = rows["norm"].masked_fill(out, 0.0)
    n_pairs = rows["n"].masked_fill(out, 0).sum((0, 2))
    divisor = n_pairs.clamp_min(1).to(norm.dtype)
    return LogitChange(
        rms=torch.linalg.vector_norm(norm, dim=(0, 2)) / divisor.sqrt(),
        n_pairs=n_pairs,
    )
