"""Which keys are seen by a row that counts, of every kind of mask, against all pairs."""

import dataclasses

import pytest
import torch

from qkeel import preset
from qkeel.kernels.statistics import _keys_seen
from qkeel.spec.call import make_call

MASKS = {
    "none": lambda b, h, t, s: None,
    "padding": lambda b, h, t, s: torch.rand(b, s) > 0.4,
    "pairs": lambda b, h, t, s: torch.rand(b, 1, t, s) > 0.6,
    "heads": lambda b, h, t, s: torch.rand(b, h, 1, s) > 0.6,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("t", "s"), [(7, 7), (4, 9), (9, 4)])
def test_keys_seen_are_those_of_any_row_that_counts(mask, is_counted, causal, t, s):
    torch.manual_seed(0)
    b, h, g = 3, 4, 2
    q, k = torch.randn(b, h, t, 8), torch.randn(b, g, s, 8)
    hidden = MASKS[mask](b, h, t, s)
    call = make_call(preset("baseline"), q, k, k, causal=causal, mask=hidden)
    counted = torch.rand(b, t) > 0.5
    counted[0] = False
    if is_counted:
        call = dataclasses.replace(call, query_mask=counted)
    pairs = call.visible(slice(None), slice(None))
    pairs = torch.ones(b, h, t, s) if pairs is None else pairs.expand(b, h, t, s)
    if is_counted:
        pairs = pairs * counted[:, None, :, None]
    expected = pairs.bool().any(2).unflatten(1, (g, -1)).any(2)
    assert torch.equal(_keys_seen(call, k), expected)
