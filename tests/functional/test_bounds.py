"""Bounds on logits and weights from norms."""

import math

import pytest
import torch

from qkeel.functional.bounds import dilution_bound, rms_logit_bound

# The weight of the best of n keys at the bound √d of gain-free RMS norm, the others N(0, 1); worked out by hand.
GOLDEN = {
    64: {512: 0.78, 4096: 0.31, 32_768: 0.052, 131_072: 0.014},
    128: {512: 0.99, 4096: 0.92, 32_768: 0.60, 131_072: 0.27},
    256: {512: 1.0, 4096: 1.0, 32_768: 0.994, 131_072: 0.976},
}


@pytest.mark.parametrize("head_dim", GOLDEN)
def test_one_key_among_many_gets_the_weight_of_the_table(head_dim):
    bound = torch.tensor(rms_logit_bound(head_dim), dtype=torch.float64)
    for n, weight in GOLDEN[head_dim].items():
        digits = len(str(weight).partition(".")[2])
        assert round(float(dilution_bound(bound, n)), digits) == weight


def test_the_bound_is_the_share_of_exponentials_and_1_for_one_key():
    logits = torch.tensor([-3.0, 0.0, 5.0, 900.0], dtype=torch.float64)
    found = dilution_bound(logits, 100)
    assert found.tolist() == pytest.approx(
        [1 / (1 + 99 * math.exp(0.5 - c)) for c in logits.tolist()], rel=1e-12
    )
    assert dilution_bound(logits, 1).tolist() == [1.0] * 4
