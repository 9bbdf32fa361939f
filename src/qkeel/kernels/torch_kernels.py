"""The kernels that need only torch: SDPA, row blocks, ReRoPE in two bands, FlexAttention.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, w window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from qkeel.errors import RefusedError
from qkeel.kernels.contract import Kernel, Refusal, average, row_blocks, without_pairs
from qkeel.kernels.encode import dense, folded
from qkeel.patching.modes import flash_on_cpu, flash_on_cpu_backward, transformed, with_tangents
from qkeel.spec.call import AttentionCall
from qkeel.spec.logits import Cap
from qkeel.spec.position import rerope
from qkeel.spec.slot import Outputs, PerRow

# Any spec with O(T) memory: full rows of logits for one block of queries at a time, recomputed in backward.

BLOCK = 1 << 21  # logits held at once: 8 MB in float32, the whole matrix for small models


@final
class Chunked(Kernel):
    """Exact for every spec, mask and shape. Each block contains complete rows, so no running maximum is needed."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        q, k = call.encoded()
        v = call.spec.values(call.v, call.params).to(q.dtype)
        if not (q.shape[2] and k.shape[2]):
            return without_pairs(q, k, v).to(call.q.dtype)
        blocks = list(row_blocks(call, BLOCK))
        if len(blocks) == 1 or not torch.is_grad_enabled() or transformed():  # transforms do not support checkpoints
            parts = [_block(call, q, k, v, rows) for rows in blocks]
        else:
            parts = [
                checkpoint(_block, call, q, k, v, rows, use_reentrant=False, preserve_rng_state=call.dropout > 0)
                for rows in blocks
            ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)  # type: ignore[arg-type]
        return out.to(call.q.dtype)


def _block(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
    keys = call.span(rows)
    if keys.start == keys.stop:
        return q.new_zeros(*q.shape[:2], rows.stop - rows.start, v.shape[-1])
    logits = call.scores(q[:, :, rows], k[:, :, keys], rows, keys)
    weights = call.spec.normalizer.weights(call.spec.cap.apply(logits), call.visible(rows, keys), call.params)
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    return average(weights, v[:, :, keys])


# torch's fused attention, for specs whose norm, position and scale fold into q and k.

QKV = tuple[Tensor, Tensor, Tensor]
MASK_BLOCK = 1 << 24  # entries of a boolean mask built at once


@final
class Sdpa(Kernel):
    """Softmax attention without a cap, for positions that fold into q and k."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, out = call.spec, "use impl='chunked' (exact, O(T) memory) or impl='auto'"
        if spec.normalizer.kind != "softmax":
            return Refusal(f"SDPA normalises by softmax only, not by {spec.normalizer.formula()}", out)
        if spec.cap.kind != "none":
            return Refusal("SDPA cannot cap logits", out)
        if not spec.position.folds:
            return Refusal(f"{spec.position.formula()} cannot be folded into q and k", out)
        if with_tangents():
            return Refusal("torch's fused attention has no forward-mode derivative", out)
        if _rounds_mask(call):
            return Refusal(f"SDPA would round the {call.mask.dtype} mask to {call.q.dtype}", out)  # type: ignore[union-attr]
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        q, k, v, scale = folded(call)
        if not (q.shape[2] and k.shape[2]):
            return without_pairs(q, k, v)
        if call.causal and call.whole:
            return _with_nan_of_an_only_key(_sdpa(call, (q, k, v), scale, causal=True), q, k, causal=True)
        if call.mask is None and call.window is None and (not call.causal or (call.plain and q.shape[2] == 1)):
            return _with_nan_of_an_only_key(_sdpa(call, (q, k, v), scale), q, k, causal=False)
        parts = []
        for rows in row_blocks(call, MASK_BLOCK):
            keys = call.span(rows)
            if keys.start == keys.stop:
                parts.append(q.new_zeros(*q.shape[:2], rows.stop - rows.start, v.shape[-1]))
                continue
            mask, empty = _mask(call, rows, keys, q.dtype)
            out = _sdpa(call, (q[:, :, rows], k[:, :, keys], v[:, :, keys]), scale, mask=mask)
            parts.append(out.masked_fill(empty, 0.0))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _with_nan_of_an_only_key(out: Tensor, q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Sets the first query's output to NaN if it sees only the first key and their logit is not finite.

    torch's CPU kernel mistakes such a row for a row without keys and returns the first value. With several queries this
    is done only without gradients: in training, all queries see the first key, so a NaN in it is visible in any case.
    Exported programs, which serve every length, are not changed.
    """
    if not q.is_cpu or torch.compiler.is_exporting():
        return out
    alone = q.shape[2] == 1 == k.shape[2]
    if not alone and (torch.is_grad_enabled() or not causal):
        return out
    first = k[:, :, 0].repeat_interleave(q.shape[1] // k.shape[1], 1)
    nothing = ((q[:, :, 0].to(torch.float32) * first).sum(-1, keepdim=True) * 0).to(out.dtype).detach()
    if alone:
        return out + nothing[:, :, None]
    out[:, :, 0] += nothing
    return out


def _rounds_mask(call: AttentionCall) -> bool:
    # torch accepts a wider mask on some backends only, and cuDNN misreads it (pytorch#191612).
    mask, low = call.mask, call.q.dtype.itemsize < 4
    return low and mask is not None and mask.is_floating_point() and mask.dtype != call.q.dtype


def _sdpa(call: AttentionCall, qkv: QKV, scale: float, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    # The fused kernels need equal sizes of keys and values, otherwise torch takes its T×T path. Padding zeros change
    # neither scores nor values.
    width = qkv[2].shape[-1]
    size = max(qkv[0].shape[-1], width)
    q, k, v = [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in qkv]
    gqa = bool(q.shape[1] != k.shape[1])  # tracing turns sizes into tensors
    out = sdpa(q, k, v, attn_mask=mask, dropout_p=call.dropout, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out[..., :width]


def _mask(call: AttentionCall, rows: slice, keys: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the mask of a block, and which rows see no key.

    Such rows are allowed to see every key, and their output is set to 0 afterwards, because a row of -inf would give
    NaN gradients.
    """
    visible, bias = call.visible(rows, keys), call.bias(rows, keys)
    assert visible is not None  # only calls with a mask, a window or causality get here
    empty = ~visible.any(-1, keepdim=True)
    seen = visible | empty
    if bias is None:
        return seen, empty
    return bias.to(dtype).masked_fill(~seen, -torch.inf), empty


# ReRoPE and its leaky forms without a T×T matrix: fused calls for near and for far keys, merged by their logsumexps.


@final
class Windowed(Kernel):
    """Causal softmax attention under ReRope, on a CPU.

    With blocks of w tokens, where w is the window, the visible pairs form three kinds of causal triangles. Far pairs
    are those of queries w … T-1 and keys 0 … T-1-w. Near pairs lie in the query's own block or, reversed in time, in
    the block before. Together there are as many pairs as in ordinary causal attention.
    """

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, out = call.spec, "use impl='chunked' (exact, O(T) memory) or impl='auto'"
        if rerope(spec.position) is None:
            return Refusal(f"the windowed kernel is for ReRope, not for {spec.position.formula()}", out)
        if spec.normalizer.kind != "softmax" or spec.cap.kind != "none":
            return Refusal("the windowed kernel is for softmax without a cap", out)
        if not (call.causal and call.whole):
            return Refusal("the windowed kernel is for causal attention of a whole sequence without a mask", out)
        if call.q.device.type != "cpu" or call.dropout or call.q.shape[-1] != call.v.shape[-1]:
            return Refusal("the windowed kernel runs on a CPU, without dropout, with values as wide as keys", out)
        if torch.compiler.is_compiling() or transformed():
            return Refusal("the windowed kernel can neither be compiled nor used in torch.func transforms", out)
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        position = rerope(call.spec.position)
        assert position is not None  # `supports` refuses other positions
        q, k = call.encoded()
        v, dtype = dense(call.spec.values(call.v, call.params)), call.q.dtype
        q = q * call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
        pos, w, t = call.pos_q, position.window, q.shape[2]
        near = [dense(x.to(dtype)) for x in (position.near(q, pos), position.near(k, pos))]
        if t <= w:
            return flash_on_cpu(*near, v, 0.0, True, scale=1.0)[0]
        far = [position.far_query(q[:, :, w:], pos[:, w:]), position.far_key(k[:, :, :-w], pos[:, :-w])]
        return _MergedSoftmax.apply(w, *near, *(dense(x.to(dtype)) for x in far), v)[0]


class _MergedSoftmax(torch.autograd.Function):
    """The softmax over the pairs of several fused calls. Each call's derivative needs only the merged output and
    lse."""

    @staticmethod
    def forward(w: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        shape = tensors[0].shape
        outs, lses = [], []
        for back, part in zip(_BACK, _parts(w, *tensors)):
            out, lse = flash_on_cpu(*part, 0.0, True, scale=1.0)
            outs.append(back(out, shape, w, 0.0))
            lses.append(back(lse[..., None], shape, w, -torch.inf))
        lse = torch.stack(lses).logsumexp(0)
        whole = torch.zeros_like(outs[0])
        for out, part_lse in zip(outs, lses):
            whole.addcmul_(out, (part_lse - lse).exp().to(out.dtype))
        return whole, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.w = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch's once_differentiable would let autograd.grad drop this silently
            raise RefusedError(
                "the windowed kernel can be differentiated only once; use impl='chunked' for higher derivatives"
            )
        *inputs, out, lse = ctx.saved_tensors
        with torch.enable_grad():  # autograd reverses the slicing into parts
            leaves = [x.detach().requires_grad_() for x in inputs]
            parts = _parts(ctx.w, *leaves)
        grads: list[Tensor] = []
        for rows, (q, k, v) in zip(_ROWS, parts):
            ours = [rows(x, ctx.w) for x in (grad_outputs[0], out, lse)]
            grad, whole, sums = (x.contiguous() for x in ours)
            grads += flash_on_cpu_backward(grad, q, k, v, whole, sums[..., 0], 0.0, True, scale=1.0)
        cut = [x for part in parts for x in part]
        return None, *torch.autograd.grad(cut, leaves, grads)


def _parts(w: int, q: Tensor, k: Tensor, far_q: Tensor, far_k: Tensor, v: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns q, k, v of each triangle; far_q and far_k [b h T-w d] are already sliced."""
    own = tuple(_blocks(x, w) for x in (q, k, v))
    before = _before(q, w), *(_behind(x, w) for x in (k, v))
    return [(far_q, far_k, v[:, :, :-w]), own, *([before] if w > 1 else [])]


def _blocks(x: Tensor, w: int) -> Tensor:
    """Reshapes [b h T d] to [b·n h w d], padding the last block with zeros."""
    return pad(x, (0, 0, 0, -x.shape[2] % w)).unflatten(2, (-1, w)).transpose(1, 2).flatten(0, 1)


def _before(x: Tensor, w: int) -> Tensor:
    """Returns the queries of all blocks but the first, reversed in time, without each block's last query, whose window
    is its block."""
    return _blocks(x[:, :, w:], w).flip(2)[:, :, 1:]


def _behind(x: Tensor, w: int) -> Tensor:
    """Returns the keys of the previous blocks, reversed in time, without each block's first key, which is a window away
    from all queries."""
    whole = (x.shape[2] - 1) // w * w
    return _blocks(x[:, :, :whole], w).flip(2)[:, :, :-1]


def _from_far(x: Tensor, shape: torch.Size, w: int, fill: float) -> Tensor:
    return pad(x, (0, 0, w, 0), value=fill)


def _from_blocks(x: Tensor, shape: torch.Size, w: int, fill: float) -> Tensor:
    b, _, t, _ = shape
    return x.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3)[:, :, :t]


def _from_before(x: Tensor, shape: torch.Size, w: int, fill: float) -> Tensor:
    rows = _from_blocks(pad(x, (0, 0, 1, 0), value=fill).flip(2), shape, w, fill)
    return pad(rows, (0, 0, w, 0), value=fill)[:, :, : shape[2]]


_ROWS = (lambda x, w: x[:, :, w:], _blocks, _before)
_BACK = (_from_far, _from_blocks, _from_before)


# FlexAttention on a GPU: windows and soft caps in one fused kernel, which also returns the largest logits.

_DEVICE = "cuda"


@final
class Flex(Kernel):
    """Softmax attention on a GPU, with or without a soft cap, causality and a window.

    The first call of each kind takes some seconds to compile. Calls with equal lengths, window and causality share
    their block mask. "auto" never chooses this kernel, since it has not been timed on a GPU.
    """

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, out = call.spec, "use impl='auto'"
        if call.q.device.type != _DEVICE:
            return Refusal("FlexAttention is used on a GPU only, since elsewhere it materialises the T×T matrix", out)
        if spec.normalizer.kind != "softmax" or spec.cap.kind == "other" or not spec.position.folds:
            return Refusal("FlexAttention is used only for softmax, with positions folded into q and k", out)
        if type(call) is not AttentionCall or call.mask is not None or call.dropout or not call.plain:
            return Refusal(
                "FlexAttention is used only without a mask, packed sequences, dropout or explicit positions", out
            )
        if not (call.q.shape[2] and call.k.shape[2]):
            return Refusal("FlexAttention needs at least one query and one key", out)
        if torch.compiler.is_compiling() or transformed() or with_tangents():
            return Refusal(
                "qkeel compiles FlexAttention itself, which does not work in another graph or in torch.func transforms",
                out,
            )
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        return _attend(call, None)[0]

    def with_maxima(self, call: AttentionCall) -> tuple[Outputs, PerRow, PerRow]:
        """Returns the output, and each row's detached logsumexp and largest logit [b h t], both of capped logits.

        Both are -inf for rows that see no key.
        """
        out, found = _attend(call, AuxRequest(lse=True, max_scores=True))
        assert found.lse is not None
        assert found.max_scores is not None
        lse, top = found.lse.detach(), found.max_scores.detach()
        return out, lse, torch.where(lse.isnan(), lse, top)  # a GPU's maximum drops NaN


def _attend(call: AttentionCall, wanted: AuxRequest | None) -> tuple[Tensor, AuxOutput]:
    q, k, v, scale = folded(call)
    found = _compiled()(
        q,
        k,
        v,
        score_mod=None if call.spec.cap.limit is None else _capped(call.spec.cap),
        block_mask=visible(call),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest() if wanted is None else wanted,
    )
    return found


@functools.lru_cache(maxsize=8)
def _capped(cap: Cap) -> Callable[..., Tensor]:
    """Returns the same function for equal caps, since a new one would be compiled again."""
    return lambda logit, b, h, row, key: cap.apply(logit)


def visible(call: AttentionCall) -> BlockMask | None:
    """Returns FlexAttention's block mask for causality and window; None if every row sees all keys."""
    if call.window is None and not call.causal:
        return None
    return _block_mask(call.q.shape[2], call.k.shape[2], call.window, call.causal, call.q.device)


@functools.lru_cache(maxsize=8)
def _block_mask(t: int, s: int, window: int | None, causal: bool, device: torch.device) -> BlockMask:
    back = s - t  # a constant in the compiled mask: 0 for square calls of any length

    # Plain lambdas, since FlexAttention counts a mask's parameters and a type-checking wrapper would hide them.
    with torch.inference_mode(False):  # the mask is cached, and a later pass may need gradients
        if window is None:
            return create_block_mask(lambda b, h, row, key: row + back >= key, None, None, t, s, device=device)
        return create_block_mask(
            lambda b, h, row, key: (
                (row + back - key < window) & (row + back - key >= 0 if causal else row + back - key > -window)
            ),
            None,
            None,
            t,
            s,
            device=device,
        )


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, AuxOutput]]:
    return torch.compile(flex_attention, fullgraph=True)  # otherwise many kinds of calls fall back to the T×T matrix
