"""Rotary position embedding: the rotation of queries and keys, and frequencies for longer contexts."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.patching.torch_state import in_function_transform, with_tangents

Pairing = Literal["half", "interleaved", "half_reversed"]


def rope_frequencies(
    rotary_dim: int, base: float = 10_000.0, device: torch.device | None = None
) -> Float[Tensor, " half"]:
    """Returns θ_i = base^(-2i/d) for i = 0 .. d/2 - 1, in radians per token, in float64, on the CPU by default.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.

    >>> [round(x, 6) for x in rope_frequencies(4).tolist()]
    [1.0, 0.01]
    """
    check_pairs(rotary_dim)
    if device is None and not torch.compiler.is_compiling():
        numbers = _frequencies(rotary_dim, base)
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")
    # On a GPU they are computed where they are used, because a copy from the host would wait.
    index = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device or "cpu")
    return base ** (-index / rotary_dim)


# Numbers and no tensor: one that is made under inference mode would spoil a later call with a gradient.
@functools.lru_cache(maxsize=64)
def _frequencies(rotary_dim: int, base: float) -> list[float]:
    return [base ** (-i / rotary_dim) for i in range(0, rotary_dim, 2)]


def check_pairs(rotary_dim: int) -> None:
    """Raises ShapeError unless the number of rotated dimensions is even and positive.

    >>> check_pairs(64)
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ShapeError(
            f"RoPE rotates pairs, so it needs an even number of dimensions; got {rotary_dim}. "
            "Use an even head_dim, or rotate a part of it (Rope(rotary=0.5))."
        )


def rope_table(
    pos: Tensor, frequencies: Float[Tensor, " half"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*pos half"], Float[Tensor, "*pos half"]]:
    """Returns cos(pos·θ_i) and sin(pos·θ_i), in float32 or wider. Source: Su et al. 2021, arXiv 2104.09864.

    >>> cos, sin = rope_table(torch.arange(2), rope_frequencies(2), torch.float32)
    >>> [[round(x, 4) for x in table.flatten().tolist()] for table in (cos, sin)]
    [[1.0, 0.5403], [0.0, 0.8415]]
    """
    table = _table_whole if torch.compiler.is_compiling() else _table
    return table(pos, frequencies, torch.promote_types(dtype, torch.float32))


def _table(
    pos: Tensor, frequencies: Tensor, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    angle = pos.to(kind)[..., None] * frequencies.to(device=pos.device, dtype=kind)
    return angle.cos(), angle.sin()


# Opaque to torch.compile, which would fuse the table into the rotation and recompute every cosine for each batch entry
# and head (twice the time of the whole module, measured on a CPU).
_table_whole = torch.library.custom_op(
    "qkeel::rope_table",
    _table,
    mutates_args=(),
    schema="(Tensor pos, Tensor frequencies, ScalarType kind) -> (Tensor, Tensor)",
)


@_table_whole.register_fake
def _(pos: Tensor, frequencies: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*pos.shape, *frequencies.shape)
    return pos.new_empty(shape, dtype=kind), pos.new_empty(shape, dtype=kind)


def rotate(
    x: Float[Tensor, "*batch d"],
    cos: Float[Tensor, "*#batch half"],
    sin: Float[Tensor, "*#batch half"],
    pairing: Pairing = "half",
) -> Float[Tensor, "*batch d"]:
    """Rotates pairs of the first 2·half dimensions of x; the remaining dimensions are unchanged.

    Pair i is (x_i, x_{i+half}) for "half" (GPT-NeoX, Llama), (x_{2i}, x_{2i+1}) for "interleaved" (RoFormer,
    Cohere, Llama 4) and (x_{i+half}, x_i) for "half_reversed" (nanochat, modded-nanogpt), which rotates the pairs of
    "half" by -θ. A pair (a, b) becomes (a cos - b sin, b cos + a sin). Source: Su et al. 2021, arXiv 2104.09864.

    Args:
        x: queries or keys.
        cos: cosines of the angles, from `rope_table`.
        sin: sines of the same angles.
        pairing: which two dimensions form a pair.

    >>> c, s = torch.zeros(1), torch.ones(1)
    >>> rotate(torch.tensor([1.0, 2.0]), c, s)
    tensor([-2.,  1.])
    """
    # torch has no rule for what is written in place under vmap.
    rotated = _rotated if with_tangents() or in_function_transform() else _Rotate.apply
    return rotated(x.to(cos.dtype), cos, sin, pairing).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Rotates with standard operators, which support every kind of derivative."""
    half = cos.shape[-1]
    (a, b), unrotated = _pairs(x, half, pairing), x[..., 2 * half :]
    a, b = a * cos - b * sin, b * cos + a * sin
    if pairing == "interleaved":
        return torch.cat([torch.stack([a, b], -1).flatten(-2), unrotated], -1)
    return torch.cat([a, b, unrotated] if pairing == "half" else [b, a, unrotated], -1)


class _Rotate(torch.autograd.Function):
    """The rotation, written into a new tensor. Its derivative is the inverse rotation, so x is not kept."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
        half = cos.shape[-1]
        # Keeps x's strides.
        out = x * _widened(cos, x.shape[-1], pairing)
        a, b, to_a, to_b = (*_pairs(x, half, pairing), *_pairs(out, half, pairing))
        to_a.addcmul_(b, sin, value=-1)
        to_b.addcmul_(a, sin)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.pairing = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad_outputs[0], cos, -sin, ctx.pairing), None, None, None


# torch looks the signature up at every call, which takes longer than the rotation of a few tokens.
_Rotate.forward.__signature__ = inspect.signature(_Rotate.forward)  # type: ignore[attr-defined]


def _pairs(x: Tensor, half: int, pairing: Pairing) -> tuple[Tensor, Tensor]:
    if pairing == "half":
        return x[..., :half], x[..., half : 2 * half]
    if pairing == "half_reversed":
        return x[..., half : 2 * half], x[..., :half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def _widened(cos: Tensor, width: int, pairing: Pairing) -> Tensor:
    """Returns the cosine for every dimension, which is that of its pair, or 1 if the dimension is not rotated."""
    by_dimension = (
        cos.repeat_interleave(2, dim=-1)
        if pairing == "interleaved"
        else torch.cat([cos, cos], dim=-1)
    )
    return (
        F.pad(by_dimension, (0, width - by_dimension.shape[-1]), value=1.0)
        if width > by_dimension.shape[-1]
        else by_dimension
    )


# RoPE frequencies for contexts longer than in training: every published way to slow the rotation.
#
# θ_i = base^(-2i/d), i = 0 … d/2 - 1, comes from `rope_frequencies`; m = i + 1 below.

Frequencies = Float[Tensor, " half"]
Ramp = Literal["code", "paper"]


def interpolate(theta: Frequencies, factor: float) -> Frequencies:
    """Returns θ_i / factor, position interpolation (PI). Source: Chen et al. 2023, arXiv 2306.15595.

    >>> interpolate(torch.tensor([1.0, 0.5]), 4.0).tolist()
    [0.25, 0.125]
    """
    return theta / factor


def ntk(
    theta: Frequencies, factor: float | Tensor, *, exact: bool = False
) -> Frequencies:
    """Returns θ_i · k^(-2i/d), which multiplies the base by k, or with `exact` θ_i · k^(-2i/(d - 2)), which slows the
    last pair by exactly k.

    Source: bloc97 2023 (NTK-aware); the exact base as in transformers' "dynamic" rope; called "NTK-old" in kexue.fm
    9706.

    >>> theta = torch.ones(64, dtype=torch.float64)
    >>> [round(float(ntk(theta, 8.0)[m - 1]), 5) for m in (1, 2, 64)]
    [1.0, 0.96803, 0.12913]

    Raises:
        InvalidValueError: `exact` is set for a single pair, which cannot both keep its frequency and slow down.
    """
    half = len(theta)
    if exact and half < 2:
        raise InvalidValueError(
            "expected at least 4 rotated dimensions for the exact base of NTK, got 2; use NTK or PI"
        )
    index = torch.arange(half, dtype=theta.dtype, device=theta.device)
    power = -index / (half - 1 if exact else half)
    return (
        theta * torch.as_tensor(factor, dtype=theta.dtype, device=theta.device) ** power
    )


def ntk_mixed(theta: Frequencies, factor: float, power: float = 0.625) -> Frequencies:
    """Returns θ_m · exp(-a m^b) with a (d/2)^b = ln k; b = 1 is NTK-fixed, b = 0 is interpolation, and the source
    prefers 0.625.

    Source: Su 2023, kexue.fm 9706.

    >>> theta = torch.ones(64, dtype=torch.float64)
    >>> [round(float(ntk_mixed(theta, 8.0)[m - 1]), 5) for m in (1, 8, 64)]
    [0.8568, 0.56727, 0.125]
    """
    m = torch.arange(1, len(theta) + 1, dtype=theta.dtype, device=theta.device)
    return theta * torch.exp(-math.log(factor) * (m / len(theta)) ** power)


def yarn(
    theta: Frequencies,
    factor: float,
    train_length: float,
    *,
    base: float,
    fast: float = 32.0,
    slow: float = 1.0,
    ramp: Ramp = "code",
) -> Frequencies:
    """Returns θ_i (γ_i + (1 - γ_i)/factor), where γ is 1 for pairs with more than `fast` turns in training and 0 for
    pairs with fewer than `slow`.

    With ramp="paper", γ is linear in the number of turns r_i = L θ_i / 2π. With ramp="code", as in the released code
    and in transformers, γ is linear in the index i between the floor of one cut-off and the ceiling of the other, which
    is a clearly different curve.

    Source: Peng et al. 2023, arXiv 2309.00071, section 3.2.

    Args:
        theta: the frequencies θ_i in radians per token.
        factor: test length / training length.
        train_length: L, in tokens.
        base: RoPE base of the frequencies.
        fast: a pair with at least this many turns in training keeps its frequency.
        slow: a pair with fewer turns is slowed by the full factor.
        ramp: the form of γ between `slow` and `fast`, "code" or "paper".

    >>> theta = rope_frequencies(8)
    >>> [round(x, 3) for x in (theta / yarn(theta, 4.0, 128, base=10_000.0)).tolist()]  # how much each pair is slowed
    [1.0, 1.6, 4.0, 4.0]
    """
    half = len(theta)
    if ramp == "paper":
        turns = train_length * theta / (2 * math.pi)
        keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    else:

        def cut(turns: float) -> float:
            return (
                half * math.log(train_length / (turns * 2 * math.pi)) / math.log(base)
            )

        # The released code clamps to the number of dimensions, not of pairs.
        low, high = (
            max(math.floor(cut(fast)), 0),
            min(math.ceil(cut(slow)), 2 * half - 1),
        )
        index = torch.arange(half, dtype=theta.dtype, device=theta.device)
        # The released code adds 0.001 where both ends are the same.
        keep = 1 - ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return theta * (keep + (1 - keep) / factor)


def yarn_magnitude(factor: float) -> float:
    """Returns 0.1 ln factor + 1, which multiplies cos and sin and therefore enters the logits squared; 1 for a factor
    of at most 1.

    Source: Peng et al. 2023, arXiv 2309.00071, equation 22.

    >>> round(yarn_magnitude(8.0), 6), round(yarn_magnitude(8.0) ** 2, 6)
    (1.207944, 1.459129)
    """
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def llama3(
    theta: Frequencies,
    factor: float,
    train_length: float,
    low: float = 1.0,
    high: float = 4.0,
) -> Frequencies:
    """Keeps pairs with more than `high` turns in training unchanged and slows pairs with fewer than `low` turns by the
    factor.

    In between, the frequency is linear in the number of turns. Source: Llama 3.1 as shipped in transformers.

    Args:
        theta: the frequencies in radians per token.
        factor: test length / training length.
        train_length: training length in tokens.
        low: a pair with fewer turns in training is slowed by the full factor.
        high: a pair with more turns keeps its frequency.

    >>> theta = rope_frequencies(8)
    >>> [round(x, 3) for x in (theta / llama3(theta, 8.0, 128)).tolist()]  # how much each pair is slowed
    [1.0, 2.339, 8.0, 8.0]
    """
    turns = train_length * theta / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return theta * (keep + (1 - keep) / factor)
