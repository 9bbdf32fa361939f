"""Rotary position embedding."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import ShapeError
from qkeel.patching.compiler_state import with_tangents

Pairing = Literal["half", "interleaved", "half_reversed"]


def rope_frequencies(
    rotary_dim: int, base: float = 10_000.0, device: torch.device | None = None
) -> Float[Tensor, " half"]:
    """θ_i = base^(-2i/d) for i = 0 .. d/2 - 1, radians per token, in float64, on a device (default: the CPU).

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.
    """
    check_pairs(rotary_dim)
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device or "cpu") / rotary_dim)


def check_pairs(rotary_dim: int) -> None:
    """Raise ShapeError unless so many dimensions can be rotated: an even number of them, and some."""
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ShapeError(
            f"RoPE rotates pairs, so it needs an even number of dimensions; got {rotary_dim}. "
            "Use an even head_dim, or rotate a part of it (Rope(rotary=0.5))."
        )


def rope_table(
    pos: Tensor, frequencies: Float[Tensor, " half"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*pos half"], Float[Tensor, "*pos half"]]:
    """Returns cos(pos·θ_i) and sin(pos·θ_i), in float32 or wider. Source: Su et al. 2021, arXiv 2104.09864."""
    table = _table_whole if torch.compiler.is_compiling() else _table
    return table(pos, frequencies, torch.promote_types(dtype, torch.float32))


def _table(pos: Tensor, frequencies: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = pos.to(kind)[..., None] * frequencies.to(device=pos.device, dtype=kind)
    return angle.cos(), angle.sin()


# The same to a compiler that may not look inside: it would fuse the table into the rotation and compute every cosine
# again for every batch and head (twice the time of the whole module, measured on a CPU).
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
    """Rotate pairs of the first 2·half dimensions of x; the rest passes through.

    Pair i is (x_i, x_{i+half}) for "half" (GPT-NeoX, Llama), (x_{2i}, x_{2i+1}) for "interleaved" (RoFormer,
    Cohere, Llama 4) and (x_{i+half}, x_i) for "half_reversed" (nanochat, modded-nanogpt: it turns "half" by -θ):
    (a, b) -> (a cos - b sin, b cos + a sin). Source: Su et al. 2021, arXiv 2104.09864.

    Args:
        x: queries or keys.
        cos: of the angles, from `rope_table`.
        sin: of the same angles.
        pairing: which two dimensions turn together.

    >>> c, s = torch.zeros(1), torch.ones(1)
    >>> rotate(torch.tensor([1.0, 2.0]), c, s)
    tensor([-2.,  1.])
    """
    rotated = _rotated if with_tangents() else _Rotate.apply
    return rotated(x.to(cos.dtype), cos, sin, pairing).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """The rotation by operators that have derivatives of every kind."""
    half = cos.shape[-1]
    (a, b), rest = _pairs(x, half, pairing), x[..., 2 * half :]
    a, b = a * cos - b * sin, b * cos + a * sin
    if pairing == "interleaved":
        return torch.cat([torch.stack([a, b], -1).flatten(-2), rest], -1)
    return torch.cat([a, b, rest] if pairing == "half" else [b, a, rest], -1)


class _Rotate(torch.autograd.Function):
    """The rotation written into one new tensor; its derivative is the rotation back, so nothing of x is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """Batched by moving the mapped axis to the front; a mapped table is lined up with x's axes."""
        x, cos, sin, pairing = args
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        lined = []
        for t, dim in ((cos, in_dims[1]), (sin, in_dims[2])):
            front = t if dim is None else t.movedim(dim, 0)
            missing = 0 if dim is None else x.ndim - front.ndim
            lined.append(front.reshape(*front.shape[:1], *(1,) * missing, *front.shape[1:]) if missing else front)
        return _Rotate.apply(x, *lined, pairing), 0

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
        half = cos.shape[-1]
        out = x * _widened(cos, x.shape[-1], pairing)  # keeps x's layout: heads far apart in memory stay so
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


def _pairs(x: Tensor, half: int, pairing: Pairing) -> tuple[Tensor, Tensor]:
    if pairing == "half":
        return x[..., :half], x[..., half : 2 * half]
    if pairing == "half_reversed":
        return x[..., half : 2 * half], x[..., :half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def _widened(cos: Tensor, width: int, pairing: Pairing) -> Tensor:
    """Returns cos of every dimension: that of its pair, 1 where nothing is rotated."""
    both = cos.repeat_interleave(2, dim=-1) if pairing == "interleaved" else torch.cat([cos, cos], dim=-1)
    return F.pad(both, (0, width - both.shape[-1]), value=1.0) if width > both.shape[-1] else both
