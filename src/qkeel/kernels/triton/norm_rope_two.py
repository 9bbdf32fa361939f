"""Norm, gain and rotation of q and k in one launch, and the way back in another, in Triton.

The programs of q come first, those of k after them; each does what the kernels for one tensor do, so the numbers are
the same bits. Not measured on a GPU yet.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor

from qkeel.kernels.native.norm_rope import NONE, backward_shapes, same_shape
from qkeel.kernels.triton.norm_rope import Foreign, Launch, back, backward, forward, once, summed, there


@triton.jit
def _forward_two(
    x_q, y_q, inverse_q, gain_q, cos_q, sin_q, eps_q, heads_q, times_q, outer_q, blocks_q, x_b_q, x_h_q, x_t_q,
    y_b_q, y_h_q, y_t_q, gain_h_q, gain_d_q, cos_b_q, cos_t_q,
    x_k, y_k, inverse_k, gain_k, cos_k, sin_k, eps_k, heads_k, times_k, outer_k, blocks_k, x_b_k, x_h_k, x_t_k,
    y_b_k, y_h_k, y_t_k, gain_h_k, gain_d_k, cos_b_k, cos_t_k,
    programs,
    D_Q: tl.constexpr, HALF_Q: tl.constexpr, WIDE_Q: tl.constexpr, TAIL_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    TOKENS_Q: tl.constexpr, STEP_Q: tl.constexpr, KIND_Q: tl.constexpr, GAIN_Q: tl.constexpr, TURN_Q: tl.constexpr,
    INVERSES_Q: tl.constexpr, WHOLE_Q: tl.constexpr,
    D_K: tl.constexpr, HALF_K: tl.constexpr, WIDE_K: tl.constexpr, TAIL_K: tl.constexpr, HEADS_K: tl.constexpr,
    TOKENS_K: tl.constexpr, STEP_K: tl.constexpr, KIND_K: tl.constexpr, GAIN_K: tl.constexpr, TURN_K: tl.constexpr,
    INVERSES_K: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Programs of q, then of k."""
    if tl.program_id(0) < programs:
        forward(
            0, x_q, y_q, inverse_q, gain_q, cos_q, sin_q, eps_q, heads_q, times_q, outer_q, blocks_q, x_b_q,
            x_h_q, x_t_q, y_b_q, y_h_q, y_t_q, gain_h_q, gain_d_q, cos_b_q, cos_t_q,
            D_Q, HALF_Q, WIDE_Q, TAIL_Q, HEADS_Q, TOKENS_Q, STEP_Q, KIND_Q, GAIN_Q, TURN_Q, INVERSES_Q, WHOLE_Q,
        )  # fmt: skip
    else:
        forward(
            programs, x_k, y_k, inverse_k, gain_k, cos_k, sin_k, eps_k, heads_k, times_k, outer_k, blocks_k,
            x_b_k, x_h_k, x_t_k, y_b_k, y_h_k, y_t_k, gain_h_k, gain_d_k, cos_b_k, cos_t_k,
            D_K, HALF_K, WIDE_K, TAIL_K, HEADS_K, TOKENS_K, STEP_K, KIND_K, GAIN_K, TURN_K, INVERSES_K, WHOLE_K,
        )  # fmt: skip


@triton.jit
def _backward_two(
    dy_q, kept_q, inverse_q, gain_q, cos_q, sin_q, dx_q, parts_q, eps_q, heads_q, times_q, outer_q, blocks_q,
    groups_q, each_q, u_b_q, u_h_q, u_t_q, k_b_q, k_h_q, k_t_q, x_b_q, x_h_q, x_t_q, gain_h_q, gain_d_q, cos_b_q,
    cos_t_q,
    dy_k, kept_k, inverse_k, gain_k, cos_k, sin_k, dx_k, parts_k, eps_k, heads_k, times_k, outer_k, blocks_k,
    groups_k, each_k, u_b_k, u_h_k, u_t_k, k_b_k, k_h_k, k_t_k, x_b_k, x_h_k, x_t_k, gain_h_k, gain_d_k, cos_b_k,
    cos_t_k,
    programs,
    D_Q: tl.constexpr, HALF_Q: tl.constexpr, WIDE_Q: tl.constexpr, TAIL_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    TOKENS_Q: tl.constexpr, STEP_Q: tl.constexpr, KIND_Q: tl.constexpr, GAIN_Q: tl.constexpr, BY_HEAD_Q: tl.constexpr,
    TURN_Q: tl.constexpr, KEPT_X_Q: tl.constexpr, WHOLE_Q: tl.constexpr,
    D_K: tl.constexpr, HALF_K: tl.constexpr, WIDE_K: tl.constexpr, TAIL_K: tl.constexpr, HEADS_K: tl.constexpr,
    TOKENS_K: tl.constexpr, STEP_K: tl.constexpr, KIND_K: tl.constexpr, GAIN_K: tl.constexpr, BY_HEAD_K: tl.constexpr,
    TURN_K: tl.constexpr, KEPT_X_K: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Programs of q, then of k."""
    if tl.program_id(0) < programs:
        backward(
            0, dy_q, kept_q, inverse_q, gain_q, cos_q, sin_q, dx_q, parts_q, eps_q, heads_q, times_q, outer_q,
            blocks_q, groups_q, each_q, u_b_q, u_h_q, u_t_q, k_b_q, k_h_q, k_t_q, x_b_q, x_h_q, x_t_q, gain_h_q,
            gain_d_q, cos_b_q, cos_t_q,
            D_Q, HALF_Q, WIDE_Q, TAIL_Q, HEADS_Q, TOKENS_Q, STEP_Q, KIND_Q, GAIN_Q, BY_HEAD_Q, TURN_Q, KEPT_X_Q,
            WHOLE_Q,
        )  # fmt: skip
    else:
        backward(
            programs, dy_k, kept_k, inverse_k, gain_k, cos_k, sin_k, dx_k, parts_k, eps_k, heads_k, times_k,
            outer_k, blocks_k, groups_k, each_k, u_b_k, u_h_k, u_t_k, k_b_k, k_h_k, k_t_k, x_b_k, x_h_k, x_t_k,
            gain_h_k, gain_d_k, cos_b_k, cos_t_k,
            D_K, HALF_K, WIDE_K, TAIL_K, HEADS_K, TOKENS_K, STEP_K, KIND_K, GAIN_K, BY_HEAD_K, TURN_K, KEPT_X_K,
            WHOLE_K,
        )  # fmt: skip


def norm_rope_two(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    gains: tuple[Tensor | None, Tensor | None],
    table: tuple[Tensor, Tensor] | None,
    kinds: tuple[int, int],
    eps: float,
    keep: tuple[bool, bool],
    step: int = 1,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g t d"]]:
    """Returns rotation(gain · norm(x)) of q and of k, the same bits as one after the other.

    Args:
        q, k: of one dtype and device. gains, kinds, keep: of q and of k, as of `norm_rope`. table, step: those of both.
        eps: of the norms. kinds: both a norm, or both none.
    """
    cos, sin = (None, None) if table is None else (table[0].contiguous(), table[1].contiguous())
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, *gains))
    found = torch.ops.qkeel_triton.norm_rope_two(q, k, *gains, cos, sin, *kinds, eps, step, *keep, tracked)
    return found[0], found[1]


def _launch(kernel: Foreign, q: Launch, k: Launch) -> None:
    sides = {"Q": {**q.constants}, "K": {**k.constants}}
    warps = [side.pop("num_warps", 0) for side in sides.values()]
    constants = {f"{name}_{end}": x for end, side in sides.items() for name, x in side.items()}
    if any(warps):
        constants["num_warps"] = max(warps)
    with torch.cuda.device_of(q.out[0]):
        kernel[(q.programs + k.programs,)](*q.arguments, *k.arguments, q.programs, **constants)


def _run(q: Tensor, k: Tensor, *how: Foreign) -> tuple[Tensor, ...]:
    gain_q, gain_k, cos, sin, kind_q, kind_k, eps, step, _, _, tracked = how
    sides = [there(x, g, cos, sin, n, eps, step, tracked) for x, g, n in ((q, gain_q, kind_q), (k, gain_k, kind_k))]
    _launch(_forward_two, *sides)
    return sides[0].out[0], sides[1].out[0], sides[0].out[1], sides[1].out[1]


def _shapes(q: Tensor, k: Tensor, *how: Foreign) -> tuple[Tensor, ...]:
    inverses = [
        x.new_empty((x.shape[0], x.shape[2], x.shape[1]) if how[-1] and kind != NONE else (0,), dtype=torch.float32)
        for x, kind in ((q, how[4]), (k, how[5]))
    ]
    return same_shape(q), same_shape(k), *inverses


def _run_back(dq: Tensor, dk: Tensor, *rest: Foreign) -> tuple[Tensor, ...]:
    kept_q, kept_k, inverse_q, inverse_k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps, step, x_q, x_k = rest
    q = back(dq, kept_q, inverse_q, gain_q, cos, sin, kind_q, eps, step, x_q)
    k = back(dk, kept_k, inverse_k, gain_k, cos, sin, kind_k, eps, step, x_k)
    _launch(_backward_two, q, k)
    return q.out[0], k.out[0], summed(q.out[1]), summed(k.out[1])


def _shapes_back(dq: Tensor, dk: Tensor, *rest: Foreign) -> tuple[Tensor, ...]:
    kept_q, kept_k, inverse_q, inverse_k, gain_q, gain_k, *_ = rest
    q, k = backward_shapes(dq, kept_q, inverse_q, gain_q), backward_shapes(dk, kept_k, inverse_k, gain_k)
    return q[0], k[0], q[1], k[1]


def _setup(ctx: Foreign, inputs: tuple[Foreign, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps, step, keep_q, keep_k, _ = inputs
    yq, yk, *inverses = output
    ctx.how = kind_q, kind_k, eps, step, keep_q, keep_k
    kept = (None, None) if kind_q == NONE else (q if keep_q else yq, k if keep_k else yk)
    ctx.save_for_backward(*kept, *inverses, gain_q, gain_k, cos, sin)
    ctx.mark_non_differentiable(*inverses)


def _derivative(ctx: Foreign, dq: Tensor, dk: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors
    gain_q, gain_k, cos, sin = kept[-4:]
    own = torch.ops.qkeel_triton
    if ctx.how[0] == NONE:  # a rotation is undone by the one back, which is differentiable in its turn
        found = own.norm_rope_two(dq, dk, None, None, cos, -sin, *ctx.how, torch.is_grad_enabled())
        return found[0], found[1], *[None] * 11
    xq, xk, over_q, over_k = own.norm_rope_two_backward(dq, dk, *kept, *ctx.how)
    gains = [
        None if gain is None else over.sum_to_size(gain.shape).to(gain.dtype)
        for gain, over in ((gain_q, over_q), (gain_k, over_k))
    ]
    return xq, xk, *gains, *[None] * 9


def register() -> None:
    """Registers the operators with torch: what runs them, their shapes, their derivative."""
    given = "Tensor? gain_q, Tensor? gain_k, Tensor? cos, Tensor? sin, int kind_q, int kind_k, float eps, int step"
    kept = "Tensor kept_q, Tensor kept_k, Tensor inverse_q, Tensor inverse_k"
    four = "(Tensor, Tensor, Tensor, Tensor)"
    for name, schema, run, shapes in (
        ("norm_rope_two", f"(Tensor q, Tensor k, {given}, bool keep_q, bool keep_k, bool tracked)", _run, _shapes),
        (
            "norm_rope_two_backward",
            f"(Tensor dq, Tensor dk, {kept}, {given}, bool x_q, bool x_k)",
            _run_back,
            _shapes_back,
        ),
    ):
        torch.library.define(f"qkeel_triton::{name}", f"{schema} -> {four}")
        torch.library.impl(f"qkeel_triton::{name}", ("cuda", "cpu"), run)  # on a CPU in interpreter mode only
        torch.library.register_fake(f"qkeel_triton::{name}", shapes)
    torch.library.register_autograd("qkeel_triton::norm_rope_two", _derivative, setup_context=_setup)
    torch.library.register_autograd("qkeel_triton::norm_rope_two_backward", once)
