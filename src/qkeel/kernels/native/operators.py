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
from jaxtyping import Float
from torch import Tensor, nn

from qkeel.errors import caution
from qkeel.kernels.native.build import compiled
from qkeel.patching.modes import below_autograd, constant_when_compiled, transformed

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


# The operators with their derivatives. Second derivatives are refused, since dropping them silently would be worse.
#
# Compilers get the operators as registered below. Outside compilers, what torch does for a registered derivative takes
# 50 microseconds a call, so a function of autograd is applied directly.

CosSin = tuple[Float[Tensor, "b 1 t half"], Float[Tensor, "b 1 t half"]]  # cos and sin, float32; b and t may be 1
Pair = tuple[Any, Any]  # one thing of q, one of k


def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out [b h t e] in q's dtype and, in float32, the lse, the largest logit before the cap and the entropy of
    each row [b h t]; the last two are empty without `stats`.

    The arguments are q [b h t d], k [b g s d], v [b g s e], as they enter the product, with the last query aligned with
    the last key; a four-dimensional mask that broadcasts to [b h t s], boolean (True: may attend) or float, or None;
    float32 slopes [h], which multiply the distance that is subtracted from logits, or None; scale, causal, window (0:
    none), cap (0: none), stats.
    """
    if torch.compiler.is_compiling():
        return OPS.attention(*arguments)  # by the name that modes over torch's functions know
    if torch.is_grad_enabled() and any([x.requires_grad for x in arguments[:3]]):  # noqa: C419
        return _Attention.apply(*arguments)  # type: ignore[return-value]
    with below_autograd():
        return OPS.attention(*arguments)


def norm_rope(
    x: Float[Tensor, "b h t d"], gain: Tensor | None, table: CosSin | None, kind: int, eps: float, keep_x: bool
) -> Float[Tensor, "b h t d"]:
    """Returns rotation(gain · norm(x)), in x's dtype and layout.

    Args:
        x: q or k.
        gain: the gain, of shape [], [d], [h 1] or [h d]; None for no gain.
        table: cos and sin of the rotation.
        kind: 0 for no norm, 1 for RMS, 2 for L2, 3 for LayerNorm.
        eps: eps of the norm.
        keep_x: whether to keep x for backward; if False, the result is kept, from which x̂ is recomputed.
    """
    cos, sin = (None, None) if table is None else table
    if not (torch.is_grad_enabled() and (x.requires_grad or (gain is not None and gain.requires_grad))):
        return OPS.norm_rope_alone.default(x, gain, cos, sin, kind, eps)
    operator = OPS.norm_rope.default if torch.compiler.is_compiling() else _NormRope.apply
    return operator(x, gain, cos, sin, kind, eps, keep_x)[0]


def norm_rope_two(
    q: Tensor, k: Tensor, gains: Pair, table: CosSin | None, kinds: Pair, eps: float, keeps: Pair
) -> tuple[Tensor, Tensor]:
    """Like `norm_rope` for q and k with one table, at less than the price of two calls."""
    cos, sin = (None, None) if table is None else table
    if not (torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in (q, k, *gains)])):  # noqa: C419
        return OPS.norm_rope_two.default(q, k, *gains, cos, sin, *kinds, eps)
    if torch.compiler.is_compiling():
        y = OPS.norm_rope.default(q, gains[0], cos, sin, kinds[0], eps, keeps[0])
        return y[0], OPS.norm_rope.default(k, gains[1], cos, sin, kinds[1], eps, keeps[1])[0]
    return _NormRopeTwo.apply(q, k, *gains, cos, sin, kinds, eps, keeps)[:2]  # type: ignore[index, return-value]


def _derivative(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the operator of a derivative; past autograd if no second derivative can be asked for."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*arguments)
    with below_autograd():
        return operator(*arguments)


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
    return *_derivative(OPS.attention_backward.default, grad_out, *ctx.saved_tensors, *ctx.options), *nothing


def _keep_for_norm_rope(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, cos, sin, kind, eps, keep_x = inputs
    y, inverse = output
    kept = x if keep_x else y
    ctx.save_for_backward(*((None, None) if kind == NONE else (kept, inverse)), gain, cos, sin)
    ctx.options = kind, eps, keep_x
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)


def _norm_rope_backward(ctx: Any, grad_out: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    kind, eps, kept_x = ctx.options
    kept, inverse, gain, *table = ctx.saved_tensors
    return *_norm_rope_gradients(grad_out, kept, inverse, gain, table, kind, eps, kept_x), *(None,) * 5


def _norm_rope_gradients(
    grad_out: Tensor | None,
    kept: Tensor | None,
    inverse: Tensor | None,
    gain: Tensor | None,
    table: list[Tensor | None],
    kind: int,
    eps: float,
    kept_x: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the gain."""
    if grad_out is None:
        return None, None
    cos, sin = table
    if kind == NONE:  # a rotation is undone by the one back, which is differentiable in its turn
        return norm_rope(grad_out, None, None if cos is None or sin is None else (cos, -sin), NONE, 0.0, False), None
    operator = OPS.norm_rope_backward.default
    grad, gain_sums = _derivative(operator, grad_out, kept, inverse, gain, cos, sin, kind, eps, kept_x)
    if gain is None:
        return grad, None
    if gain_sums.numel() == gain.numel():  # the usual gain, at the price of a view
        return grad, gain_sums.view(gain.shape).to(gain.dtype)
    return grad, gain_sums.sum_to_size(gain.shape).to(gain.dtype)


class _Attention(torch.autograd.Function):
    """The operator `attention` where there is no compiler."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            output = OPS.attention(*arguments)
        _keep_for_attention(ctx, arguments, output)
        return output

    backward = staticmethod(_attention_backward)


class _NormRope(torch.autograd.Function):
    """The operator `norm_rope` where there is no compiler."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            output = OPS.norm_rope.default(*arguments)
        _keep_for_norm_rope(ctx, arguments, output)
        return output

    backward = staticmethod(_norm_rope_backward)


class _NormRopeTwo(torch.autograd.Function):
    """The operator `norm_rope` for q and k with one table, where there is no compiler."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        gain_q: Tensor | None,
        gain_k: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        kinds: Pair,
        eps: float,
        keeps: Pair,
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            new_q, inverse_q = OPS.norm_rope.default(q, gain_q, cos, sin, kinds[0], eps, keeps[0])
            new_k, inverse_k = OPS.norm_rope.default(k, gain_k, cos, sin, kinds[1], eps, keeps[1])
        of_q = (None, None) if kinds[0] == NONE else (q if keeps[0] else new_q, inverse_q)
        of_k = (None, None) if kinds[1] == NONE else (k if keeps[1] else new_k, inverse_k)
        ctx.save_for_backward(*of_q, gain_q, *of_k, gain_k, cos, sin)
        ctx.options = kinds, eps, keeps
        ctx.mark_non_differentiable(inverse_q, inverse_k)
        ctx.set_materialize_grads(False)
        return new_q, new_k, inverse_q, inverse_k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kinds, eps, keeps = ctx.options
        *kept, cos, sin = ctx.saved_tensors
        grad_q, grad_gain_q = _norm_rope_gradients(grads[0], *kept[:3], [cos, sin], kinds[0], eps, keeps[0])
        grad_k, grad_gain_k = _norm_rope_gradients(grads[1], *kept[3:], [cos, sin], kinds[1], eps, keeps[1])
        return grad_q, grad_k, grad_gain_q, grad_gain_k, None, None, None, None, None


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
