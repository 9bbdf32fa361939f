"""Blocks of rows and folding: the parts that kernels share."""

import pytest
import torch

from qkeel.kernels.contract import row_blocks
from qkeel.spec import AttentionSpec
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
