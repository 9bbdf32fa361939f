"""Blocks of rows, folding, averaging: the parts that kernels share."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each_row import each_row

from qkeel import preset, reference
from qkeel.kernels.contract import average, row_blocks
from qkeel.kernels.norm_rope.encode import folded
from qkeel.spec import PRESETS, AttentionSpec, NoCap
from qkeel.spec.call import make_call


@given(
    t=st.integers(1, 50),
    s=st.integers(1, 50),
    h=st.integers(1, 4),
    elements=st.integers(1, 5000),
)
def test_blocks_cover_every_row_once_and_hold_at_most_the_elements_asked_for(
    t: int, s: int, h: int, elements: int
) -> None:
    q, k = torch.zeros(1, h, t, 2), torch.zeros(1, h, s, 2)
    call = make_call(AttentionSpec(), q, k, k)
    blocks = list(row_blocks(call, elements))
    assert [i for block in blocks for i in range(block.start, block.stop)] == list(
        range(t)
    )
    assert all((b.stop - b.start) * h * s <= max(elements, h * s) for b in blocks)


def test_average_equals_repeating_the_values() -> None:
    weights, v = torch.rand(2, 6, 3, 5), torch.randn(2, 2, 5, 4)
    assert torch.allclose(average(weights, v), weights @ v.repeat_interleave(3, dim=1))


@each_row("name", PRESETS)
def test_folded_tensors_give_the_logits_of_the_spec(name: str) -> None:
    spec = preset(name)
    if not isinstance(spec.cap, NoCap):
        spec = spec.replace(cap=NoCap())
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    params = {n: p.double() for n, p in spec.init_params(4, 4, 8).items()}
    call = make_call(spec, q, k, v, params=params, causal=False)
    fq, fk, fv, scale = folded(call)
    truth = reference.attend_call(call)
    assert torch.allclose(fq @ fk.mT * scale, truth.logits, atol=1e-12)
    assert torch.allclose((fq @ fk.mT * scale).softmax(-1) @ fv, truth.out, atol=1e-12)


def test_one_call_without_mask_does_when_all_is_visible_or_square_and_causal() -> None:
    q, k = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8)
    spec, pos = preset("baseline"), torch.arange(5)
    assert make_call(spec, k, k, k).whole
    assert make_call(spec, q, k, k, causal=False).whole
    assert not make_call(spec, q, k, k).whole
    assert not make_call(spec, k, k, k, pos_q=pos, pos_k=pos).whole
    assert not make_call(
        spec, k, k, k, causal=False, mask=torch.ones(5, 5, dtype=torch.bool)
    ).whole
