"""Rows of packed sequences and of windows on both sides, by the kernels, are those of each sequence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.each_row import each_row
from tests.packed_sequences import CASES, packed, spoiled

from qkeel.kernels import contract
from qkeel.kernels.statistics import exact_bracket, logit_maxima, logit_stats
from qkeel.kernels.triton import available
from qkeel.spec import AttentionSpec
from qkeel.spec.call import band_call, make_call, with_query_mask


@pytest.mark.usefixtures("_poisoned")
@each_row("name, how", CASES[1:3])
def test_every_row_is_that_of_its_sequence(name: str, how: dict[str, Any], through_triton: list[Any]) -> None:
    check_rows_of(name, how, through_triton)


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@each_row("name, how", CASES)
def test_every_row_of_many_tiles_is_that_of_its_sequence(
    name: str, how: dict[str, Any], through_triton: list[Any]
) -> None:
    check_rows_of(name, how, through_triton)


def check_rows_of(name: str, how: dict[str, Any], through_triton: list[Any]) -> None:
    one = packed(name, **how)
    before = len(through_triton)
    found = contract.row_statistics(one.call())
    assert found is not None
    for field, ours, true in zip(available.RowNumbers._fields, found, one.rows()):
        near = (ours[0].double() - true).abs() <= 5e-6 * (1 + true.abs())
        assert (near | (ours[0] == true)).all(), field
    counted = torch.arange(one.q.shape[2]) % 3 > 0
    over = counted & (one.rows()[4][0] > 0)
    top, low = logit_maxima(with_query_mask(one.call(), counted[None]))
    torch.testing.assert_close(top.double(), one.rows()[0][:, over].amax(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(low.double(), one.rows()[1][:, over].amin(1), rtol=1e-5, atol=1e-5)
    assert len(through_triton) == before + 2


@pytest.mark.slow
def test_heads_of_packed_sequences(through_triton: list[Any]) -> None:
    for name, window in (("no multiple of a tile", "all"), ("keys of their own", "left")):
        one = packed(name, window=window)
        call, (top, _, _, entropy, n) = one.call(), one.rows()
        over = n[0] > 0
        found = exact_bracket(call, "no logsumexp here")
        assert found.note == "computed in one pass over q and k: no logsumexp here"
        assert found.entropy is not None
        torch.testing.assert_close(found.lower.double(), top.amax(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy.double(), entropy[:, over].mean(1), rtol=1e-5, atol=1e-5)
        assert found.certified is not None
        assert found.certified.all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_nan_in_one_sequence_reaches_its_rows_and_is_never_certified(through_triton: list[Any]) -> None:
    one, own = spoiled("no multiple of a tile")
    call = one.call()
    rows = contract.row_statistics(call)
    assert rows is not None
    lost = torch.zeros(4, one.q.shape[2], dtype=torch.bool)
    lost[:2, own] = True  # of the heads that share the key head
    assert all(torch.equal(x[0].isnan(), lost) for x in rows)
    told = [True, True, False, False]
    assert logit_maxima(call)[0].isnan().tolist() == told
    for price in ("entropy", "entropy:sample=16"):
        found = exact_bracket(call, "x", price)  # type: ignore[arg-type]
        assert found.lower.isnan().tolist() == found.upper.isnan().tolist() == told
        assert found.certified is not None
        assert (~found.certified).tolist() == told


def test_a_window_on_both_sides_of_a_batch_goes_the_same_way_and_slopes_do_not(through_triton: list[Any]) -> None:
    q, k = torch.randn(2, 4, 70, 24), torch.randn(2, 2, 90, 24)
    plain = make_call(AttentionSpec(), q, k, k, causal=False)
    call = band_call(plain, window=(5, 30))
    found, exact = contract.row_statistics(call), logit_stats(call)
    assert found is not None
    torch.testing.assert_close(found.largest.amax((0, 2)), exact.max_logit)
    torch.testing.assert_close(found.entropy.mean((0, 2)), exact.entropy)
    assert contract.row_statistics(band_call(plain, window=(5, 30), slopes=torch.ones(4))) is None
    assert len(through_triton) == 1
