"""Calls of one shape are reduced together, and each has the numbers that it has alone."""

import pytest
import torch

from qkeel.functional.statistics import TENSORS
from qkeel.kernels.logits import compiled
from qkeel.kernels.statistics import plain_rows, reduce_calls


def test_each_call_has_its_own_numbers_in_the_order_of_the_calls():
    if not compiled.ready():
        pytest.skip("needs the compiled pass")
    torch.manual_seed(0)
    rows = []
    for t, groups in ((9, 2), (5, 4), (9, 2), (9, 4), (9, 2), (1, 2)):
        q, k = torch.randn(2, 4, t, 8), torch.randn(2, groups, t, 8)
        call = plain_rows(q, k, 0.4, causal=True)
        assert call is not None
        rows.append(call)
    together = reduce_calls(rows)
    for call, joint in zip(rows, together, strict=True):
        (alone,) = reduce_calls([call])
        for name in TENSORS:
            torch.testing.assert_close(
                getattr(joint, name), getattr(alone, name), rtol=1e-6, atol=1e-6
            )
