"""Norm, gain and rotation of q and k as one operator with two backends, in C++ and in Triton, and its derivative.

The backends define the same operators in their namespaces, `torch.ops.qkeel_native` and `torch.ops.qkeel_triton`:
`norm_rope`, `norm_rope_two` without a derivative, and `norm_rope_backward`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.kernels import triton_access as available
from qkeel.kernels.native.operators import (
    OPS,
    derivative,
    ready,
    refuse_second_derivative,
)
from qkeel.patching.torch_state import below_autograd

# The kind of a call: a norm, plus WHOLE for a norm over all heads of a token, plus INTERLEAVED for pairs x_2i and
# x_{2i+1} in place of x_i and x_{i+half}. The C++ operators know the norms alone.
NONE, RMS, L2, LAYER = range(4)
WHOLE, INTERLEAVED = 4, 8

# Cos and sin, float32; b and t may be 1.
CosSin = tuple[Float[Tensor, "b 1 t half"], Float[Tensor, "b 1 t half"]]
# One thing of q, one of k.
Pair = tuple[Any, Any]


def operators_for(device: torch.device) -> Any | None:
    """Returns the namespace of the operators for a device, or None if torch computes norm and rotation."""
    if device.type == "cpu":
        return OPS if ready() else None
    return torch.ops.qkeel_triton if available.usable(device) else None


def norm_rope(
    operators: Any,
    x: Float[Tensor, "b h t d"],
    gain: Tensor | None,
    table: CosSin | None,
    norm_code: int,
    eps: float,
    keep_x: bool,
) -> Float[Tensor, "b h t d"]:
    """Returns rotation(gain · norm(x)), in x's dtype and layout.

    Args:
        operators: the namespace of the backend, see `operators_for`.
        x: q or k.
        gain: the gain, of shape [], [d], [h 1] or [h d]; None for no gain.
        table: cos and sin of the rotation.
        norm_code: the norm, and what is added to its number.
        eps: eps of the norm.
        keep_x: whether to keep x for backward; if False, the result is kept, from which x̂ is recomputed.
    """
    cos, sin = (None, None) if table is None else table
    if torch.compiler.is_compiling():
        return operators.norm_rope.default(x, gain, cos, sin, norm_code, eps, keep_x)[0]
    if not (
        torch.is_grad_enabled()
        and (x.requires_grad or (gain is not None and gain.requires_grad))
    ):
        with below_autograd():
            return operators.norm_rope.default(
                x, gain, cos, sin, norm_code, eps, keep_x
            )[0]
    return _NormRope.apply(operators, x, gain, cos, sin, norm_code, eps, keep_x)[0]  # type: ignore[index]


def norm_rope_two(
    operators: Any,
    q: Tensor,
    k: Tensor,
    gains: Pair,
    table: CosSin | None,
    norm_codes: Pair,
    eps: float,
    keeps: Pair,
) -> tuple[Tensor, Tensor]:
    """Like `norm_rope` for q and k with one table, bit for bit, and without a gradient at less than the price of two."""
    if torch.is_grad_enabled() and any(
        [x is not None and x.requires_grad for x in (q, k, *gains)]
    ):
        return (
            norm_rope(operators, q, gains[0], table, norm_codes[0], eps, keeps[0]),
            norm_rope(operators, k, gains[1], table, norm_codes[1], eps, keeps[1]),
        )
    cos, sin = (None, None) if table is None else table
    return operators.norm_rope_two.default(q, k, *gains, cos, sin, *norm_codes, eps)


def register_derivatives(namespace: str) -> None:
    """Registers the derivatives of a backend's operators for torch.compile."""
    operators = getattr(torch.ops, namespace)
    backward = functools.partial(_norm_rope_backward, operators)
    torch.library.register_autograd(
        f"{namespace}::norm_rope", backward, setup_context=_keep_for_backward
    )
    torch.library.register_autograd(
        f"{namespace}::norm_rope_backward", refuse_second_derivative
    )


def _keep_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    x, gain, cos, sin, norm_code, eps, keep_x = inputs
    y, inverse = output
    ctx.save_for_backward(*_kept(norm_code, keep_x, x, y, inverse), gain, cos, sin)
    ctx.options = norm_code, eps, keep_x
    # For backward alone; what is not differentiated costs no gradient of zeros.
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)


def _kept(
    norm_code: int, keep_x: bool, x: Tensor, y: Tensor, inverse: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Returns what backward needs of a call besides gain and table: nothing for a rotation alone."""
    if norm_code % WHOLE == NONE:
        return None, None
    return (x if keep_x else y), inverse


def _norm_rope_backward(
    operators: Any, ctx: Any, grad_out: Tensor | None, _: object
) -> tuple[Tensor | None, ...]:
    return (
        *_gradients(operators, grad_out, ctx.saved_tensors, *ctx.options),
        None,
        None,
        None,
        None,
        None,
    )


def _gradients(
    operators: Any,
    grad_out: Tensor | None,
    saved: tuple[Tensor | None, ...],
    norm_code: int,
    eps: float,
    kept_x: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the gain."""
    if grad_out is None:
        return None, None
    kept, inverse, gain, cos, sin = saved
    # A rotation is undone by the one back, which is differentiable in its turn.
    if norm_code % WHOLE == NONE:
        table = None if cos is None or sin is None else (cos, -sin)
        return norm_rope(operators, grad_out, None, table, norm_code, 0.0, False), None
    operator = operators.norm_rope_backward.default
    grad, gain_sums = derivative(
        operator, grad_out, kept, inverse, gain, cos, sin, norm_code, eps, kept_x
    )
    if gain is None:
        return grad, None
    # The usual gain, at the price of a view.
    if gain_sums.numel() == gain.numel():
        return grad, gain_sums.view(gain.shape).to(gain.dtype)
    return grad, gain_sums.sum_to_size(gain.shape).to(gain.dtype)


class _NormRope(torch.autograd.Function):
    """The operator `norm_rope` where there is no compiler; see `kernels.native.operators` for why."""

    @staticmethod
    def forward(ctx: Any, operators: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            output = operators.norm_rope.default(*arguments)
        _keep_for_backward(ctx, arguments, output)
        ctx.operators = operators
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_norm_rope_backward(ctx.operators, ctx, *grads)
