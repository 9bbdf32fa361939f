"""ReRoPE and its leaky forms without a T×T matrix: fused calls for near and for far keys, merged by their logsumexps.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, w window.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkeel.errors import RefusedError
from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.norm_rope.encode import dense
from qkeel.patching.torch_state import flash_on_cpu, flash_on_cpu_backward, transformed
from qkeel.spec.call import AttentionCall
from qkeel.spec.position import rerope
from qkeel.spec.slot import Outputs


@final
class Windowed(Kernel):
    """Causal softmax attention under ReRope, on a CPU.

    With blocks of w tokens, where w is the window, the visible pairs form three kinds of causal triangles. Far pairs
    are those of queries w … T-1 and keys 0 … T-1-w. Near pairs lie in the query's own block or, reversed in time, in
    the block before. Together there are as many pairs as in ordinary causal attention.
    """

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec = call.spec
        is_supported = (
            rerope(spec.position) is not None
            and spec.normalizer.kind == "softmax"
            and spec.cap.kind == "none"
            and call.causal
            and call.whole
            and call.q.device.type == "cpu"
            and not call.dropout
            and call.q.shape[-1] == call.v.shape[-1]
            and not (torch.compiler.is_compiling() or transformed())
        )
        if is_supported:
            return None
        return Refusal(
            f"the windowed kernel is for causal softmax under ReRope, not for {spec.position.formula()}, of a whole "
            "sequence on a CPU, without a mask, cap, dropout, compiler or torch.func, with values as wide as keys"
        )

    def __call__(self, call: AttentionCall) -> Outputs:
        position = rerope(call.spec.position)
        # `supports` refuses other positions.
        assert position is not None
        q, k = call.encoded()
        v, dtype = dense(call.spec.values(call.v, call.params)), call.q.dtype
        # The factor may differ by row (log n), which the scale of the fused call cannot, so q carries it and the
        # calls get 1.
        q = q * call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
        pos, w, t = call.pos_q, position.window, q.shape[2]
        near = [
            dense(x.to(dtype)) for x in (position.near(q, pos), position.near(k, pos))
        ]
        # All pairs are near.
        if t <= w:
            return flash_on_cpu(*near, v, 0.0, True, scale=1.0)[0]
        far = [
            position.far_query(q[:, :, w:], pos[:, w:]),
            position.far_key(k[:, :, :-w], pos[:, :-w]),
        ]
        return _MergedSoftmax.apply(w, *near, *(dense(x.to(dtype)) for x in far), v)[0]


class _MergedSoftmax(torch.autograd.Function):
    """The softmax over the pairs of several fused calls. Each call's derivative needs only the merged output and
    lse."""

    @staticmethod
    def forward(w: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        shape = tensors[0].shape
        outs = []
        lses = []
        for to_rows, triangle in zip(_TO_ROWS, _triangles(w, *tensors)):
            out, lse = flash_on_cpu(*triangle, 0.0, True, scale=1.0)
            outs.append(to_rows(out, shape, w, 0.0))
            lses.append(to_rows(lse[..., None], shape, w, -torch.inf))
        lse = torch.stack(lses).logsumexp(0)
        merged = torch.zeros_like(outs[0])
        # A softmax over the union: each call's output weighs as much as its keys' share of all exponentials. Rows
        # outside a triangle have an lse of -inf there, which weighs 0.
        for out, out_lse in zip(outs, lses):
            merged.addcmul_(out, (out_lse - lse).exp().to(out.dtype))
        return merged, lse

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.w = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Torch's once_differentiable would let autograd.grad drop this silently.
        if torch.is_grad_enabled():
            raise RefusedError(
                "the windowed kernel can be differentiated only once; use impl='chunked' for higher derivatives"
            )
        *inputs, out, lse = ctx.saved_tensors
        # Autograd reverses the slicing into triangles.
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            triangles = _triangles(ctx.w, *leaves)
        grads: list[Tensor] = []
        for rows, (q, k, v) in zip(_ROWS, triangles):
            row_grad = rows(grad_outputs[0], ctx.w).contiguous()
            row_out = rows(out, ctx.w).contiguous()
            row_lse = rows(lse, ctx.w).contiguous()[..., 0]
            grads += flash_on_cpu_backward(
                row_grad, q, k, v, row_out, row_lse, 0.0, True, scale=1.0
            )
        slices = [x for triangle in triangles for x in triangle]
        return None, *torch.autograd.grad(slices, leaves, grads)


def _triangles(
    w: int, q: Tensor, k: Tensor, far_q: Tensor, far_k: Tensor, v: Tensor
) -> list[tuple[Tensor, ...]]:
    """Returns q, k, v of each triangle; far_q and far_k [b h T-w d] are already sliced."""
    far = far_q, far_k, v[:, :, :-w]
    near = _blocks(q, w), _blocks(k, w), _blocks(v, w)
    # In blocks of one token nothing is left of the block before, of which queries and keys each lack a token.
    if w == 1:
        return [far, near]
    return [far, near, (_before(q, w), _behind(k, w), _behind(v, w))]


def _blocks(x: Tensor, w: int) -> Tensor:
    """Reshapes [b h T d] to [b·n h w d], padding the last block with zeros."""
    padded = pad(x, (0, 0, 0, -x.shape[2] % w))
    return padded.unflatten(2, (-1, w)).transpose(1, 2).flatten(0, 1)


def _before(x: Tensor, w: int) -> Tensor:
    """Returns the queries of all blocks but the first, reversed in time, without each block's last query, whose window
    is its block."""
    return _blocks(x[:, :, w:], w).flip(2)[:, :, 1:]


def _behind(x: Tensor, w: int) -> Tensor:
    """Returns the keys of the previous blocks, reversed in time, without each block's first key, which is a window away
    from all queries."""
    whole_blocks = (x.shape[2] - 1) // w * w
    return _blocks(x[:, :, :whole_blocks], w).flip(2)[:, :, :-1]


def _from_far(x: Tensor, shape: torch.Size, w: int, absent_value: float) -> Tensor:
    return pad(x, (0, 0, w, 0), value=absent_value)


def _from_blocks(x: Tensor, shape: torch.Size, w: int, absent_value: float) -> Tensor:
    b, _, t, _ = shape
    return x.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3)[:, :, :t]


def _rows_of_before(
    x: Tensor, shape: torch.Size, w: int, absent_value: float
) -> Tensor:
    blocks = pad(x, (0, 0, 1, 0), value=absent_value).flip(2)
    rows = _from_blocks(blocks, shape, w, absent_value)
    return pad(rows, (0, 0, w, 0), value=absent_value)[:, :, : shape[2]]


# For each triangle: its rows of an output, and the way back from its output to rows.
_ROWS = (lambda x, w: x[:, :, w:], _blocks, _before)
_TO_ROWS = (_from_far, _from_blocks, _rows_of_before)
