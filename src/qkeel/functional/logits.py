"""From q·k to attention weights: factors on the logits, soft caps and normalizers; losses on output logits; DeepNorm's
scales of branches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.errors import InvalidValueError, check


def qk_products(
    q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
) -> Float[Tensor, "b h t s"]:
    """Returns the products q·k, where each of the g key heads serves h / g query heads.

    >>> qk_products(torch.ones(1, 2, 1, 3), torch.ones(1, 1, 4, 3)).shape
    torch.Size([1, 2, 1, 4])
    """
    b, h, t, d = q.shape
    g, s = k.shape[1], k.shape[2]
    if g == h:
        return q @ k.mT
    # The queries that share a key head form one matrix, so that keys are not copied for each of them.
    return (q.reshape(b, g, h // g * t, d) @ k.mT).view(b, h, t, s)


# Position-dependent factors on the logit, and constants for scales.


def log_n(
    n: Tensor, train_length: int, clip: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns ln(n) / ln(train_length) for queries that see n keys; `clip` keeps it at 1 or above.

    The factor is 1 at the training length. It is 0 for n = 1, which is harmless with a single key.

    Source: Su 2021, kexue.fm 8823 (entropy invariance); clip: kexue.fm 9706.

    Args:
        n: the number of keys that each query sees.
        train_length: the training length in tokens, at least 2.
        clip: keep the factor at 1 or above.
        dtype: dtype of the result.

    Raises:
        InvalidValueError: train_length is under 2.

    >>> log_n(torch.tensor([512, 4096]), 512)
    tensor([1.0000, 1.3333])
    """
    if train_length < 2:
        raise InvalidValueError(
            f"log n needs a train_length of at least 2, got {train_length}"
        )
    factor = n.clamp_min(1).to(dtype).log() / math.log(train_length)
    return factor.clamp_min(1.0) if clip else factor


def floor_log_temperature(
    pos: Tensor,
    alpha: float = 0.1,
    floor: int = 8192,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns 1 + alpha·ln(1 + ⌊(pos + 1) / floor⌋); 1 for negative positions (queries before the first key).

    Source: Llama 4 as shipped in transformers (attn_scale, floor_scale).

    Args:
        pos: the position of each query.
        alpha: the weight of the logarithm.
        floor: the number of positions per step.
        dtype: dtype of the result.

    >>> floor_log_temperature(torch.tensor([0, 8191, 16383]))
    tensor([1.0000, 1.0693, 1.1099])
    """
    return 1 + alpha * torch.log1p(
        torch.div((pos + 1).clamp_min(0), floor, rounding_mode="floor").to(dtype)
    )


def qk_norm_init(length: float) -> float:
    """Returns QKNorm's initial logit scale g₀ = log₂(L² - L), in nats; L is the 97.5th percentile of training lengths.

    Source: Henry et al. 2020, arXiv 2010.04245, section 3.

    Raises:
        InvalidValueError: the length is not above 1.

    >>> round(qk_norm_init(72), 4)
    12.3197
    """
    check(length > 1, "a length above 1", length)
    return math.log2(length * length - length)


def cosine_scale(train_length: float) -> float:
    """Returns λ = 4 ln n with n = train_length / 2, the scale of cosine attention, in nats, for a head_dim near 128.

    Source: Su 2023, kexue.fm 9812 and 9859.

    Raises:
        InvalidValueError: the training length is not above 2.

    >>> round(cosine_scale(512), 2)
    22.18
    """
    check(train_length > 2, "a training length above 2", train_length)
    return 4 * math.log(train_length / 2)


@functools.cache
def gradient_scale(n: float, head_dim: int | None = None) -> float:
    """Returns the λ that maximises λ (1 - Σ p_i²) with p = softmax(λ s), the scale with the largest gradient.

    The n similarities s have a density ∝ (1 - s²)^((d-3)/2), like cosines of random vectors of dimension head_dim, or
    are N(0, 1) if head_dim is None. Σ p_i² is approximated by M(2λ)/(n M(λ)²), where M is the moment-generating
    function of s; that is, numerator and denominator are averaged separately. If the ratio itself were averaged, the
    maximised quantity would keep growing beyond this λ.

    Args:
        n: number of keys that a query sees, above 1; for a decoder, half of the training length.
        head_dim: d, at least 2.

    Source: Su 2023, kexue.fm 9812. For head_dim 128 and n near 256, λ is about 4 ln n.

    >>> round(gradient_scale(256, 128), 2), round(gradient_scale(256, 64), 2), round(gradient_scale(256), 4)
    (22.29, 16.64, 1.8635)
    """
    check(1 < n < math.inf, "a finite number of keys above one", n)
    check(
        head_dim is None or head_dim >= 2,
        "a head_dim of at least 2",
        f"head_dim={head_dim}",
    )

    def passed_on(scale: float) -> float:
        # Ln M(2λ) - 2 ln M(λ) of N(0, 1).
        log_ratio = scale * scale
        if head_dim is not None:
            log_ratio = _log_moment(2 * scale, head_dim) - 2 * _log_moment(
                scale, head_dim
            )
        return scale * (1 - math.exp(log_ratio) / n)

    # The bracket is doubled until the maximum lies inside it.
    high = 1.0
    while passed_on(2 * high) > passed_on(high):
        high *= 2
    return _summit(passed_on, 2 * high)


def _log_moment(scale: float, head_dim: int) -> float:
    """Returns ln E e^(λs) for a cosine s in dimension head_dim: ln Σ_k (λ²/4)^k / (k! (d/2)(d/2 + 1)…(d/2 + k - 1))."""
    term = total = 1.0
    k = 0
    # Beyond, a term changes no bit of the sum in float64.
    while term > 1e-17 * total:
        k += 1
        term *= scale * scale / 4 / (k * (head_dim / 2 + k - 1))
        total += term
    return math.log(total)


def _summit(height: Callable[[float], float], right: float) -> float:
    """Returns the argument of a unimodal function's maximum in (0, right), by golden-section search."""
    low, high, golden = 0.0, right, (math.sqrt(5) - 1) / 2
    while high - low > 1e-9 * right:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (a, high) if height(a) < height(b) else (low, b)
    return (low + high) / 2


def sigmoid_bias(length: float) -> float:
    """Returns the bias b = -ln n, in nats, that keeps row sums of sigmoid attention near 1 at initialisation.

    Source: Ramapuram et al. 2024, arXiv 2409.04431, section 3.

    Raises:
        InvalidValueError: the length is not above 0.

    >>> round(sigmoid_bias(2048), 6)
    -7.624619
    """
    check(length > 0, "a length above 0", length)
    return -math.log(length)


def deepnorm(sublayers: int) -> tuple[float, float]:
    """Returns DeepNorm's (α, β) = (n^(1/4), (4n)^(-1/4)) for n sublayers, where x ← N(αx + F(x)) and β scales F's
    output at initialisation.

    Source: Wang et al. 2022, arXiv 2203.00555, decoder-only: (2M)^(1/4) and (8M)^(-1/4) for M layers of two sublayers.
    qkeel counts a layer that has a single sublayer (GAU) once.

    Raises:
        InvalidValueError: there is no sublayer.

    >>> [round(x, 4) for x in deepnorm(48)]
    [2.6321, 0.2686]
    """
    check(sublayers >= 1, "at least one sublayer", sublayers)
    return sublayers**0.25, (4 * sublayers) ** -0.25


# Soft capping of logits.


def softcap(z: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """Returns cap · tanh(z / cap), which is monotone, at most cap in magnitude, and near the identity for |z| << cap.

    Source: Gemma 2 (arXiv 2408.00118), section 2; earlier, Bello et al. 2016.

    Raises:
        InvalidValueError: the cap is not above 0.

    >>> softcap(torch.tensor([10.0, 500.0]), 50.0)
    tensor([ 9.8688, 50.0000])
    """
    if not cap > 0:
        raise InvalidValueError(f"expected a cap above 0, got {cap}")
    # The formula would give ∞ · 0.
    if math.isinf(cap):
        return z
    return cap * torch.tanh(z / cap)


# Normalizers: logits to weights. `visible` is True where a query may see a key; None means everywhere.
#
# A row that sees no key gets weights and gradients of 0, never NaN.

Logits = Float[Tensor, "*batch t s"]
Visible = Bool[Tensor, "*#batch #t #s"] | None


def _hide(z: Tensor, visible: Tensor | None) -> Tensor:
    # The most negative finite number instead of -inf keeps rows without keys free of NaN, forward and backward.
    return z if visible is None else z.masked_fill(~visible, torch.finfo(z.dtype).min)


def _blank(weights: Tensor, visible: Tensor | None) -> Tensor:
    return weights if visible is None else weights.masked_fill(~visible, 0.0)


def softmax(z: Logits, visible: Visible = None) -> Logits:
    """Returns exp(z_ij) / Σ_j exp(z_ij) over the visible keys. Source: Vaswani et al. 2017, arXiv 1706.03762.

    >>> softmax(torch.zeros(1, 2), torch.tensor([[True, False]])).tolist()
    [[1.0, 0.0]]
    """
    return _blank(torch.softmax(_hide(z, visible), dim=-1), visible)


def sink_softmax(z: Logits, sink: Tensor, visible: Visible = None) -> Logits:
    """Returns exp(z_ij) / (exp(s) + Σ_j exp(z_ij)), whose rows sum to less than 1; `sink` broadcasts to [*batch t 1].

    With s = 0, this is "softmax off by one"; gpt-oss and DeepSeek-V4 learn s per head.

    Source: Miller 2023, Attention is off by one; gpt-oss as shipped in transformers.

    >>> sink_softmax(torch.zeros(1, 3), torch.tensor(0.0)).tolist()
    [[0.25, 0.25, 0.25]]
    """
    column = sink.to(z.dtype).expand(*z.shape[:-1], 1)
    padded = torch.softmax(torch.cat([_hide(z, visible), column], dim=-1), dim=-1)
    return _blank(padded[..., :-1], visible)


def sigmoid(z: Logits, bias: float | Tensor, visible: Visible = None) -> Logits:
    """Returns σ(z + b) in [0, 1], not normalised over the row. Source: Ramapuram et al. 2024, arXiv 2409.04431.

    >>> sigmoid(torch.zeros(1, 2), 0.0, torch.tensor([[True, False]])).tolist()
    [[0.5, 0.0]]
    """
    return _blank(torch.sigmoid(z + bias), visible)


def squared_relu(z: Logits, visible: Visible = None) -> Logits:
    """Returns relu(z)² / n, where n is the number of keys visible to the row.

    Source: Hua et al. 2022, arXiv 2202.10447, as implemented in bert4keras, which divides after squaring. The paper's
    own code divides the logit by n before squaring, which gives a different result.

    >>> squared_relu(torch.tensor([[2.0, -1.0]])).tolist()
    [[2.0, 0.0]]
    """
    n = (
        z.shape[-1]
        if visible is None
        else visible.expand(z.shape).sum(-1, keepdim=True).clamp_min(1)
    )
    return _blank(torch.relu(z).square() / n, visible)


def softpick(z: Logits, visible: Visible = None, eps: float = 1e-8) -> Logits:
    """Returns relu(e^z - 1) / (Σ|e^z - 1| + eps), whose rows sum to at most 1, so that no sink is needed.

    It is computed with the row maximum m subtracted: relu(e^(z-m) - e^-m) / (Σ|e^(z-m) - e^-m| + eps).

    Source: Zuhri et al. 2025, arXiv 2504.20966, equation 5 and their code.

    >>> [round(x, 3) for x in softpick(torch.tensor([[0.0, 1.0, 1.0]]))[0].tolist()]
    [0.0, 0.5, 0.5]
    """
    # Amax fails without keys.
    if z.shape[-1] == 0:
        return z
    hidden = _hide(z, visible)
    # At least 0, so that e^-m cannot overflow. The result does not depend on m, so no gradient needs to pass through
    # it.
    m = hidden.amax(-1, keepdim=True).detach().clamp_min(0.0)
    rise = _blank(torch.exp(hidden - m) - torch.exp(-m), visible)
    return torch.relu(rise) / (rise.abs().sum(-1, keepdim=True) + eps)


def entropy(weights: Float[Tensor, "*batch s"]) -> Float[Tensor, "*batch"]:
    """Returns the entropy -Σ p ln p of each row, rescaled to sum to one; in nats, at most ln s, and 0 for an empty row.

    Weights that do not sum to one (sinks, sigmoid, squared ReLU, softpick) are rescaled first, so the entropy measures
    the spread over the keys, regardless of the share that goes to a sink.

    Source: Zhai et al. 2023, arXiv 2303.06296 (attention entropy).

    >>> [round(x, 4) for x in entropy(torch.tensor([[0.2, 0.2], [1.0, 0.0]])).exp().tolist()]  # two keys, and one
    [2.0, 1.0]
    """
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total > 0, total, torch.ones_like(total))
    # xlogy(p, p) would have a NaN gradient at p = 0.
    return -(p * torch.where(p > 0, p, torch.ones_like(p)).log()).sum(-1)


# Losses on output logits.


def z_loss(
    logits: Float[Tensor, "*batch vocab"], coefficient: float = 1e-4
) -> Float[Tensor, ""]:
    """Returns coefficient · mean((ln Σ e^logit)²), which keeps the normaliser of the output logits near 1.

    The logsumexp is squared; at least one public codebase adds it unsquared, which is a different loss.

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5; Wortsman et al. 2023, arXiv 2309.14322.

    >>> z_loss(torch.zeros(3, 4), 1.0)
    tensor(1.9218)
    """
    return (
        coefficient
        * torch.logsumexp(logits.float() if logits.dtype.itemsize < 4 else logits, -1)
        .square()
        .mean()
    )
