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
from qkeel.patching.modes import constant_when_compiled, transformed

STORED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that operators read; they compute in float32
WIDEST = 1024  # WIDEST in the sources
NONE = 0  # kind of a norm_rope call that only rotates
WHOLE = 4  # added to the kind for a norm over all heads of a token, which only the Triton kernels support
_LOADING = threading.Lock()
OPS: Any = torch.ops.qkeel_native


@constant_when_compiled
def ready() -> bool:
    """True if the operators can currently be used; the first call may compile them.

    False if QKEEL_NATIVE=0 disables them, if they cannot be compiled, and under a torch.func transform, an export or a
    trace. A failure is reported once, after which torch computes instead.
    """
    if os.environ.get("QKEEL_NATIVE", "1") == "0" or sys.platform != "linux" or transformed():
        return False
    with _LOADING:
        return _loaded()


def is_plain(x: Tensor) -> bool:
    """True for torch's own tensor class; a subclass may override operators."""
    return type(x) in (Tensor, nn.Parameter)


def reads(x: Tensor) -> bool:
    """True if operators support x: a plain tensor of a STORED dtype, with rows of at most 1,024 numbers, a multiple of
    8."""
    return is_plain(x) and x.dtype in STORED and x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= WIDEST and x.numel() > 0


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
        caution(f"qkeel computes without its compiled kernels: {reason}. QKEEL_NATIVE=0 silences this.")
        return False
    for name, shapes in SHAPES.items():
        torch.library.register_fake(f"qkeel_native::{name}", shapes)
    for name, (setup_context, backward) in DERIVATIVES.items():
        torch.library.register_autograd(f"qkeel_native::{name}", backward, setup_context=setup_context)
    return True


# The shapes of the results, which torch.compile asks for instead of calling an operator.


def same_shape(x: Tensor, *_: object) -> Tensor:
    """Returns an empty tensor like x, with contiguous rows."""
    return torch.empty_like(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, ...]:
    b, h, t, _ = q.shape
    out = q.new_empty(b, t, h, v.shape[-1]).transpose(1, 2)
    stats = others[-1]
    lse = q.new_empty(b, h, t, dtype=torch.float32)
    top, entropy = (q.new_empty((b, h, t) if stats else (0,), dtype=torch.float32) for _ in range(2))
    return out, lse, top, entropy


def _attention_backward_shapes(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    return same_shape(q), same_shape(k), same_shape(v)


def _decode_shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    b, h, t, _d = q.shape
    return q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)


def _norm_rope_shapes(x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    kind = others[3]
    y = same_shape(x)
    if kind == NONE:
        return y, y.new_empty(0, dtype=torch.float32)
    b, h, t = y.shape[:3]
    if y.stride(1) < y.stride(2):
        return y, y.new_empty(b, t, h, dtype=torch.float32).transpose(1, 2)
    return y, y.new_empty(b, h, t, dtype=torch.float32)


def backward_shapes(
    grad_out: Tensor, kept: Tensor, inverse: Tensor, gain: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for the gradients of x and of the gain, the latter per head or for all heads."""
    shape = (0,) if gain is None else (kept.shape[1] if gain.ndim == 2 else 1, kept.shape[3])
    return same_shape(kept), kept.new_empty(shape, dtype=torch.float32)


def _logit_rows_shapes(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.new_empty(11, *q.shape[:3], dtype=torch.float32)
    return rows, q.new_empty(q.shape[:3], dtype=torch.int64), k.new_empty(k.shape[:3], dtype=torch.float32)


def _guided_shapes(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)


SHAPES: dict[str, Callable[..., object]] = {
    "attention": _attention_shapes,
    "attention_backward": _attention_backward_shapes,
    "decode": _decode_shape,
    "norm_rope": _norm_rope_shapes,
    "norm_rope_alone": same_shape,
    "norm_rope_two": lambda q, k, *_: (same_shape(q), same_shape(k)),
    "norm_rope_backward": backward_shapes,
    "logit_rows": _logit_rows_shapes,
    "logit_extremes": lambda q, *_: q.new_empty(2, *q.shape[:3], dtype=torch.float32),
    "guided_maxima": _guided_shapes,
    "logsumexp_bracket": lambda lse, *_: (lse.new_empty(lse.shape[1]), lse.new_empty(lse.shape[1])),
}


# The derivatives. Those of the derivatives are refused, since dropping them silently would be worse.


def _keep_for_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, slopes, *options, _stats = inputs
    out, lse, top, entropy = output
    if mask is not None and mask.requires_grad:
        raise RuntimeError("the fused attention has no derivative with respect to its mask; QKEEL_NATIVE=0 has one")
    ctx.save_for_backward(q, k, v, out, lse, mask, slopes)
    ctx.options = options
    ctx.mark_non_differentiable(lse, top, entropy)
    ctx.set_materialize_grads(False)


def _attention_backward(ctx: Any, grad_out: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if grad_out is None:
        return None, None, None, *nothing
    return *OPS.attention_backward.default(grad_out, *ctx.saved_tensors, *ctx.options), *nothing


def _keep_for_norm_rope(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, cos, sin, kind, eps, keep_x = inputs
    y, inverse = output
    kept = x if keep_x else y
    ctx.save_for_backward(*((None, None) if kind == NONE else (kept, inverse)), gain, cos, sin)
    ctx.options = kind, eps, keep_x
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)


def _norm_rope_backward(ctx: Any, grad_out: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 5
    if grad_out is None:
        return None, None, *nothing
    kept, inverse, gain, cos, sin = ctx.saved_tensors
    kind, eps, kept_x = ctx.options
    if kind == NONE:  # a rotation is undone by the one back, which is differentiable in its turn
        back = OPS.norm_rope.default(grad_out, None, cos, None if sin is None else -sin, NONE, 0.0, False)
        return back[0], None, *nothing
    grad, gain_sums = OPS.norm_rope_backward.default(grad_out, kept, inverse, gain, cos, sin, kind, eps, kept_x)
    if gain is None:
        return grad, None, *nothing
    return grad, gain_sums.sum_to_size(gain.shape).to(gain.dtype), *nothing


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError("qkeel's fused kernels can be differentiated once; QKEEL_NATIVE=0 does not fuse them")


DERIVATIVES: dict[str, tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]] = {
    "attention": (_keep_for_attention, _attention_backward),
    "attention_backward": (_keep_nothing, _refuse),
    "norm_rope": (_keep_for_norm_rope, _norm_rope_backward),
    "norm_rope_backward": (_keep_nothing, _refuse),
}
