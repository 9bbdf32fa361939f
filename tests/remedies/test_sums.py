"""Remedies on a logit that is a sum of products act on all of them, or refuse."""

import pytest
import torch
from tests.attention import values
from tests.sites.sums import SUMS, Sum, batch, gated, largest, made
from tests.training import sgd, step

import qkeel
from qkeel.errors import RefusedError

STEPS = 2


def trained(model, remedy, lr):
    """Steps of descent under a remedy; the weights before them."""
    before = values(model)
    optimizer = sgd(model, lr)
    with qkeel.apply(model, remedy, optimizer, batch=batch()):
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(model, optimizer, batch())
    return before


def test_qk_clip_brings_the_whole_logit_to_the_threshold():
    for name in SUMS:
        model = made(name)
        assert largest(model) > 3
        trained(model, "qk_clip:threshold=1", lr=0.0)
        assert largest(model) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    "remedy", ["qk_clip", "lalr", "qk_lr", "spectral_cap", "qk_weight_decay", "qk_norm"]
)
def test_a_part_that_is_not_known_is_refused(remedy):
    torch.manual_seed(0)
    model = Sum(gated, "q1", "k1")
    optimizer = sgd(model)
    with pytest.raises(RefusedError, match=remedy):
        qkeel.apply(model, remedy, optimizer, batch=batch())
