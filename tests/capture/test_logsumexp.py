"""SDPA calls that keep the logsumexp: the same bits as torch's own, and left alone where torch has none."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

from qkeel.capture import named_attention
from qkeel.capture.logsumexp import attention_with_logsumexp
from qkeel.capture.readers import SDPA

CALLS = {
    "causal": {"is_causal": True},
    "full": {},
    "scaled": {"is_causal": True, "scale": 0.7},
    "bool mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril(2)},
    "grouped": {"is_causal": True, "enable_gqa": True},
}


def drawn(seed, dtype, groups):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, n, 7, 16, generator=generator).to(dtype).requires_grad_()
        for n in (4, groups, groups)
    )
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", CALLS)
def test_output_and_gradients_are_the_same_bits_and_the_logsumexp_is_right(kind, dtype):
    q, k, v = drawn(3, dtype, 2 if kind == "grouped" else 4)
    rows = attention_with_logsumexp((q, k, v), CALLS[kind])
    assert rows is not None
    out, lse = rows
    expected = F.scaled_dot_product_attention(q, k, v, **CALLS[kind])
    assert torch.equal(out, expected)
    above = torch.linspace(-1, 1, out.numel(), dtype=torch.float64)
    gradients = [
        torch.autograd.grad(
            x, (q, k, v), above.view(out.shape).to(dtype), retain_graph=True
        )
        for x in (out, expected)
    ]
    assert all(map(torch.equal, *gradients))
    scale = CALLS[kind].get("scale", 16**-0.5)
    keys = k.repeat_interleave(4 // k.shape[1], 1)
    logits = (q.double() @ keys.double().mT) * scale
    if "attn_mask" in CALLS[kind]:
        logits = logits.masked_fill(~CALLS[kind]["attn_mask"], -torch.inf)
    if "is_causal" in CALLS[kind]:
        hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    assert lse.double() == pytest.approx(logits.logsumexp(-1).detach(), rel=1e-5)


# Where torch chooses an operator without a logsumexp, or adds numbers that are no part of the logit.
UNFUSED = [
    *("dropout", "float mask", "narrow values", "broadcast", "three-dimensional"),
    "empty",
]


def unfused(change):
    q, k, v = (x.detach() for x in drawn(4, torch.float32, 4))
    kwargs: dict[str, Any] = {}
    if change == "dropout":
        kwargs = {"dropout_p": 0.1}
    if change == "float mask":
        kwargs = {"attn_mask": torch.randn(7, 7)}
    if change == "narrow values":
        v = v[..., :8]
    if change == "broadcast":
        k, v = k[:1], v[:1]
    if change == "three-dimensional":
        q, k, v = q[0], k[0], v[0]
    if change == "empty":
        q = q[:, :, :0]
    return q, k, v, kwargs


@pytest.mark.parametrize("change", [*UNFUSED, "autocast", "mode", "meta", "vmap"])
def test_where_torch_has_no_logsumexp_or_another_may_change_the_call_it_is_left_alone(
    change,
):
    q, k, v, kwargs = unfused(change)

    def lse(q):
        return attention_with_logsumexp((q, k, v), kwargs)

    if change == "meta":
        q, k, v = (x.to("meta") for x in (q, k, v))
    if change == "vmap":
        answers = []
        torch.func.vmap(lambda x: (answers.append(lse(x)), x)[1])(q[None])
        assert answers == [None]
        return
    around = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "mode": torch.device("cpu"),
    }.get(change, contextlib.nullcontext())
    with around:
        assert lse(q) is None


@pytest.fixture
def stand_in():
    bounds = named_attention.CompiledBounds()
    yield F.scaled_dot_product_attention
    bounds.remove()


def test_the_name_is_torchs_own_again_when_nobody_asks(
    monkeypatch,
):
    # Clips of earlier tests may still wait for the garbage collector.
    monkeypatch.setattr(named_attention, "_holders", [0])
    monkeypatch.setattr(F, "scaled_dot_product_attention", SDPA)
    first, second = named_attention.CompiledBounds(), named_attention.CompiledBounds()
    assert F.scaled_dot_product_attention is not SDPA
    first.remove()
    first.remove()
    assert F.scaled_dot_product_attention is not SDPA
    second.remove()
    assert F.scaled_dot_product_attention is SDPA


@pytest.mark.parametrize("kind", [causal_lower_right, causal_upper_left])
def test_under_the_name_mask_objects_mean_what_they_say(kind, stand_in):
    q, k, v = drawn(5, torch.float32, 4)
    q = q[:, :, :4]
    visible = torch.ones(4, 7, dtype=torch.bool).tril(
        3 if kind is causal_lower_right else 0
    )
    expected = SDPA(q, k, v, attn_mask=visible)
    assert_close(stand_in(q, k, v, attn_mask=kind(4, 7)), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripts_and_exports_hold_torchs_own_function(stand_in: Any) -> None:
    class Plain(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = drawn(6, torch.float32, 4)[0].detach()
    expected = SDPA(x, x, x, is_causal=True)
    assert torch.equal(torch.jit.script(Plain())(x), expected)
    program = torch.export.export(Plain(), (x,))
    assert "qkeel" not in program.graph_module.code
    assert torch.equal(program.module()(x), expected)


@pytest.mark.parametrize("change", UNFUSED)
def test_a_compiled_call_that_torch_does_not_fuse_is_left_alone(change, stand_in):
    torch._dynamo.reset()
    q, k, v, kwargs = unfused(change)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **kwargs)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True)
    named_attention._notes.tops = tops = []
    try:
        out = run(q, k, v)
    finally:
        named_attention._notes.tops = None
    assert not tops
    if change != "dropout":
        assert torch.equal(out, SDPA(q, k, v, **kwargs))
