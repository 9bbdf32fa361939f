"""The compiled C++ operators, `torch.ops.qkeel_native.*`: their library, their shapes and their derivatives."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.errors import caution
from qkeel.kernels.native.build import compiled
from qkeel.patching.torch_state import (
    below_autograd,
    constant_when_compiled,
    transformed,
)

# Dtypes that operators read; they compute in float32.
STORED = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)
# WIDEST in the sources.
WIDEST = 1024
_LOADING = threading.Lock()
OPS: Any = torch.ops.qkeel_native


@constant_when_compiled
def ready() -> bool:
    """True if the operators can currently be used; the first call may compile them.

    False if QKEEL_NATIVE=0 disables them, if they cannot be compiled, and under a torch.func transform, an export or a
    trace. A failure is reported once, after which torch computes instead.
    """
    if (
        os.environ.get("QKEEL_NATIVE", "1") == "0"
        or sys.platform != "linux"
        or transformed()
    ):
        return False
    # Two threads must neither compile nor register at once.
    with _LOADING:
        return _loaded()


def is_plain(x: Tensor) -> bool:
    """True for torch's own tensor class; a subclass may override operators."""
    return type(x) in (Tensor, nn.Parameter)


def reads(x: Tensor) -> bool:
    """True if operators support x: a plain tensor of a STORED dtype, with rows of at most 1,024 numbers, a multiple of
    8."""
    return (
        is_plain(x)
        and x.dtype in STORED
        and x.shape[-1] % 8 == 0
        and 0 < x.shape[-1] <= WIDEST
        and x.numel() > 0
    )


@functools.cache
def _loaded() -> bool:
    """Loads the library, or warns and returns False if there is none."""
    try:
        try:
            ctypes.CDLL(str(compiled()))
        except OSError:  # built on another machine that shares the folder, or torn
            ctypes.CDLL(str(compiled(anew=True)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        caution(
            f"qkeel computes without its compiled kernels: {reason}. QKEEL_NATIVE=0 silences this."
        )
        return False
    for name, shapes in SHAPES.items():
        torch.library.register_fake(f"qkeel_native::{name}", shapes)
    # Which imports this module.
    from qkeel.kernels.norm_rope.operator import register_derivatives

    register_derivatives("qkeel_native")
    attention_name = "qkeel_native::attention"
    torch.library.register_autograd(
        attention_name, _attention_backward, setup_context=_keep_for_attention
    )
    torch.library.register_autograd(
        f"{attention_name}_backward", refuse_second_derivative
    )
    return True


# The shapes of the results, which torch.compile asks for instead of calling an operator.


def same_shape(x: Tensor, *_: object) -> Tensor:
    """Returns an empty tensor like x, with contiguous rows."""
    return torch.empty_like(
        x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    )


def _attention_shapes(
    q: Tensor, k: Tensor, v: Tensor, *options: object
) -> tuple[Tensor, ...]:
    b, h, t, _ = q.shape
    # As the kernel writes: the heads of a token together, as the next projection reads them.
    out = q.new_empty(b, t, h, v.shape[-1]).transpose(1, 2)
    stats = options[-1]
    lse = q.new_empty(b, h, t, dtype=torch.float32)
    top, entropy = (
        q.new_empty((b, h, t) if stats else (0,), dtype=torch.float32) for _ in range(2)
    )
    return out, lse, top, entropy


def _attention_backward_shapes(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return same_shape(q), same_shape(k), same_shape(v)


def _decode_shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    b, h, t, _d = q.shape
    return q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)


def _norm_rope_shapes(x: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    y, kind = same_shape(x), options[3]
    # a rotation alone.
    if kind == 0:
        return y, y.new_empty(0, dtype=torch.float32)
    b, h, t = y.shape[:3]
    # The kernel goes through memory in order, so these lie like the rows of x.
    if y.stride(1) < y.stride(2):
        return y, y.new_empty(b, t, h, dtype=torch.float32).transpose(1, 2)
    return y, y.new_empty(b, h, t, dtype=torch.float32)


def backward_shapes(
    grad_out: Tensor, kept: Tensor, inverse: Tensor, gain: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for the gradients of x and of the gain, the latter per head or for all heads."""
    shape = (
        (0,)
        if gain is None
        else (kept.shape[1] if gain.ndim == 2 else 1, kept.shape[3])
    )
    return same_shape(kept), kept.new_empty(shape, dtype=torch.float32)


def _logit_rows_shapes(
    q: Tensor, k: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.new_empty(13, *q.shape[:3], dtype=torch.float32)
    return (
        rows,
        q.new_empty(q.shape[:3], dtype=torch.int64),
        k.new_empty(k.shape[:3], dtype=torch.float32),
    )


SHAPES: dict[str, Callable[..., object]] = {
    "attention": _attention_shapes,
    "attention_backward": _attention_backward_shapes,
    "decode": _decode_shape,
    "norm_rope": _norm_rope_shapes,
    "norm_rope_two": lambda q, k, *_: (same_shape(q), same_shape(k)),
    "norm_rope_backward": backward_shapes,
    "logit_rows": _logit_rows_shapes,
    "logit_extremes": lambda q, *_: q.new_empty(3, *q.shape[:3], dtype=torch.float32),
}


# The operators with their derivatives. Second derivatives are refused, since dropping them silently would be worse.
#
# Compilers get the operators as registered below. Outside compilers, what torch does for a registered derivative takes
# 50 microseconds a call, so a function of autograd is applied directly.


def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out [b h t e] in q's dtype and, in float32, the lse, the largest logit before the cap and the entropy of
    each row [b h t]; the last two are empty without `stats`.

    The arguments are q [b h t d], k [b g s d], v [b g s e], as they enter the product, with the last query aligned with
    the last key; a four-dimensional mask that broadcasts to [b h t s], boolean (True: may attend) or float, or None;
    float32 slopes [h], which multiply the distance that is subtracted from logits, or None; scale, causal, window (0:
    none), cap (0: none), stats.
    """
    if torch.compiler.is_compiling():
        # By the name that modes over torch's functions know.
        return OPS.attention(*arguments)
    if torch.is_grad_enabled() and any([x.requires_grad for x in arguments[:3]]):
        return _Attention.apply(*arguments)  # type: ignore[return-value]
    with below_autograd():
        return OPS.attention(*arguments)


def derivative(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the operator of a derivative; past autograd if no second derivative can be asked for."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*arguments)
    with below_autograd():
        return operator(*arguments)


def _keep_for_attention(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    q, k, v, mask, slopes, *options, _stats = inputs
    out, lse, top, entropy = output
    if mask is not None and mask.requires_grad:
        raise RuntimeError(
            "the fused attention has no derivative with respect to its mask; QKEEL_NATIVE=0 has one"
        )
    ctx.save_for_backward(q, k, v, out, lse, mask, slopes)
    ctx.options = options
    ctx.mark_non_differentiable(lse, top, entropy)
    ctx.set_materialize_grads(False)


def _attention_backward(
    ctx: Any, grad_out: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    # Of mask, slopes and the five options.
    nothing = (None,) * 7
    if grad_out is None:
        return None, None, None, *nothing
    return *derivative(
        OPS.attention_backward.default, grad_out, *ctx.saved_tensors, *ctx.options
    ), *nothing


class _Attention(torch.autograd.Function):
    """The operator `attention` where there is no compiler."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            output = OPS.attention(*arguments)
        _keep_for_attention(ctx, arguments, output)
        return output

    backward = staticmethod(_attention_backward)


def refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    """Raises RuntimeError: the backward of a backward operator."""
    raise RuntimeError(
        "qkeel's fused kernels can be differentiated once; QKEEL_NATIVE=0 and QKEEL_TRITON=0 do not fuse them"
    )
