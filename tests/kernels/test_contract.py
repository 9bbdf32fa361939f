"""Blocks of rows and folding: the parts that kernels share."""

import pytest
import torch

from qkeel import preset, reference
from qkeel.kernels.contract import average, row_blocks
from qkeel.kernels.norm_rope.encode import folded
from qkeel.spec import AttentionSpec, NoCap
from qkeel.spec.call import make_call


@pytest.mark.parametrize(
    ("t", "s", "h", "elements"), [(1, 1, 1, 1), (50, 7, 3, 100), (9, 50, 4, 5000)]
)
def test_blocks_cover_every_row_once_and_hold_at_most_the_elements_asked_for(
    t, s, h, elements
):
    q, k = torch.zeros(1, h, t, 2), torch.zeros(1, h, s, 2)
    blocks = list(row_blocks(make_call(AttentionSpec(), q, k, k), elements))
    assert [i for b in blocks for i in range(b.start, b.stop)] == list(range(t))
    assert all((b.stop - b.start) * h * s <= max(elements, h * s) for b in blocks)


@pytest.mark.parametrize(
    "name", ["baseline", "qwen3", "cosa_logn", "swin_v2", "gemma2"]
)
def test_folded_tensors_give_the_logits_of_the_spec(name):
    spec = preset(name).replace(cap=NoCap())
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    params = {n: p.double() for n, p in spec.init_params(4, 4, 8).items()}
    call = make_call(spec, q, k, v, params=params, causal=False)
    q, k, v, scale = folded(call)
    truth = reference.attend_call(call)
    torch.testing.assert_close(q @ k.mT * scale, truth.logits)
    torch.testing.assert_close(average((q @ k.mT * scale).softmax(-1), v), truth.out)


def test_a_call_is_whole_when_all_is_visible_or_square_and_causal():
    q, k = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8)
    spec, pos = preset("baseline"), torch.arange(5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert make_call(spec, k, k, k).whole
    assert make_call(spec, q, k, k, causal=False).whole
    assert not make_call(spec, q, k, k).whole
    assert not make_call(spec, k, k, k, pos_q=pos, pos_k=pos).whole
    assert not make_call(spec, k, k, k, causal=False, mask=mask).whole
