"""Rows of packed sequences and of windows on both sides, by the kernels, are those of each sequence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.each_row import each_row
from tests.packed_sequences import CASES, packed, spoiled

from qkeel.kernels.logits import gpu as gpu_statistics
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import AttentionSpec
from qkeel.spec.call import band_call, make_call, with_query_mask


@pytest.mark.usefixtures("_poisoned")
@each_row("name, how", CASES[1:3])
def test_every_row_is_that_of_its_sequence(
    name: str, how: dict[str, Any], through_triton: list[Any]
) -> None:
    check_rows_of(name, how, through_triton)


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@each_row("name, how", CASES)
def test_every_row_of_many_tiles_is_that_of_its_sequence(
    name: str, how: dict[str, Any], through_triton: list[Any]
) -> None:
    check_rows_of(name, how, through_triton)


def check_rows_of(name: str, how: dict[str, Any], through_triton: list[Any]) -> None:
    one, before = packed(name, **how), len(through_triton)
    fields = gpu_statistics.row_fields(one.call(), 1.0)
    assert fields is not None
    rows, true = fields[0][:, 0].double(), one.rows()
    seen = true[4][0] > 0
    for ours, there in ((rows[0], true[0]), (rows[1], true[1]), (rows[5], true[3])):
        torch.testing.assert_close(ours[:, seen], there[:, seen], rtol=5e-6, atol=5e-6)
    over = (torch.arange(one.q.shape[2]) % 3 > 0) & seen
    ours = max_stats(with_query_mask(one.call(), over[None]))
    torch.testing.assert_close(
        ours.max_logit.double(), true[0][:, over].amax(1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        ours.min_logit.double(), true[1][:, over].amin(1), rtol=1e-5, atol=1e-5
    )
    assert len(through_triton) == before + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_nan_in_one_sequence_reaches_its_rows_alone(
    through_triton: list[Any],
) -> None:
    one, own = spoiled("no multiple of a tile")
    fields = gpu_statistics.row_fields(one.call(), 1.0)
    assert fields is not None
    lost = torch.zeros(4, one.q.shape[2], dtype=torch.bool)
    lost[:2, own] = True  # of the heads that share the key head
    assert torch.equal(fields[0][0, 0].isnan(), lost)
    assert max_stats(one.call()).max_logit.isnan().tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_a_window_on_both_sides_of_a_batch_goes_the_same_way_and_slopes_do_not(
    through_triton: list[Any],
) -> None:
    q, k = torch.randn(2, 4, 70, 24), torch.randn(2, 2, 90, 24)
    plain = make_call(AttentionSpec(), q, k, k, causal=False)
    call = band_call(plain, window=(5, 30))
    torch.testing.assert_close(max_stats(call).max_logit, logit_stats(call).max_logit)
    assert (
        gpu_statistics.extremes(band_call(plain, window=(5, 30), slopes=torch.ones(4)))
        is None
    )
    assert len(through_triton) == 1
