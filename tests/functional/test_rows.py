"""Properties of the statistics of rows, on random blocks with hidden pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkeel import attention, preset
from qkeel.functional import statistics
from qkeel.functional.statistics import KernelRows, VisibleKeys, reduce_kernel_rows
from qkeel.kernels.statistics import logit_stats
from qkeel.spec import AttentionSpec, Fixed
from qkeel.spec.call import make_call

from .properties import few, randn, seeds, some_visible

sizes = st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4])


@few
@given(seed=seeds, size=sizes, single=st.booleans())
def test_cosines_shares_and_normalised_entropies_stay_in_their_ranges(
    seed: int, size: float, single: bool
) -> None:
    dtype = torch.float32 if single else torch.float64
    q, k = (
        (size * randn(seed, 2, 4, 7, 3)).to(dtype),
        randn(seed + 1, 2, 2, 9, 3).to(dtype),
    )
    k[:, :, 3] = q[:, ::2, 3]  # a cosine of 1 in exact arithmetic
    call = make_call(
        AttentionSpec(), q, k, k, causal=False, mask=some_visible(seed, 7, 9)
    )
    stats = logit_stats(call, 1.0)
    assert (stats.cos_max.abs() <= 1).all()
    assert (stats.cos_mean.abs() <= 1).all()
    assert (stats.cos_mean <= stats.cos_max).all()
    for share in (stats.normalized_entropy, stats.sink_share, stats.share_above):
        assert ((share >= 0) & (share <= 1)).all()
    most = q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2)).repeat_interleave(
        2
    )
    assert (stats.qk_frobenius <= most * stats.n_products.sqrt() * (1 + 1e-5)).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_uniform_attention_has_all_the_entropy_there_is_dropout_or_not(
    dropout: float,
) -> None:
    n = 33
    q, k = torch.zeros(2, 3, 5, 8), torch.randn(2, 3, n, 8)
    stats = attention(
        q, k, k, spec=preset("baseline"), causal=False, dropout=dropout, stats=True
    )[1]
    torch.testing.assert_close(stats.entropy, torch.full((3,), math.log(n)))
    torch.testing.assert_close(stats.normalized_entropy, torch.ones(3))
    torch.testing.assert_close(stats.sink_share, torch.full((3,), 1 / n))
    assert stats.cos_mean.tolist() == [0.0] * 3


def test_worked_example_of_two_rows() -> None:
    # Logits [1] and [ln 3, 0] after the scale of 1: entropy of (3/4, 1/4), sink 3/4; q·k are 1, ln 3, 0.
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, math.log(3.0)], [5.0, 0.0]]]], dtype=torch.float64)
    stats = logit_stats(
        make_call(AttentionSpec(scale=Fixed(1.0)), q, k, k), threshold=1.05
    )
    entropy = math.log(4) - 0.75 * math.log(3)
    assert stats.entropy.item() == pytest.approx(entropy / 2)
    assert stats.normalized_entropy.item() == pytest.approx(entropy / math.log(2))
    assert stats.sink_share.item() == pytest.approx(0.75)
    assert stats.share_above.item() == pytest.approx(1 / 3)
    assert stats.qk_frobenius.item() == pytest.approx(math.sqrt(1 + math.log(3) ** 2))
    norm = math.sqrt(1 + math.log(3) ** 2)
    assert stats.cos_max.item() == pytest.approx(math.log(3) / norm)
    assert stats.cos_mean.item() == pytest.approx((1 + math.log(3)) / norm / 3)
    assert (stats.n_free.item(), stats.n_products.item()) == (1, 3)
    assert (stats.key_norm.item(), stats.key_norm_max.item()) == pytest.approx(
        ((norm + 5.0) / 2, 5.0)
    )
    gap = math.log(3) / 2  # of the one row that sees two keys
    assert stats.logit_gap.item() == pytest.approx(gap)


def test_a_row_of_one_key_has_no_entropy_at_all() -> None:
    q = torch.randn(1, 1, 6, 4)
    stats = logit_stats(
        make_call(
            AttentionSpec(), q, q, q, causal=False, mask=torch.eye(6, dtype=torch.bool)
        )
    )
    assert stats.entropy.item() == 0
    assert stats.n_free.item() == 0
    assert stats.normalized_entropy.item() == 0


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf, 3.0])
def test_hidden_places_are_blanked_whatever_stands_there(rubbish: float) -> None:
    x = torch.full((1, 2, 2, 5), rubbish)
    x[..., :3] = 1.0
    x[..., 0, 3] = -2.0
    seen = VisibleKeys(torch.tensor([[True, False], [False, False]])[None, None], 3, 5)
    blank = torch.tensor([[1.0, 1, 1, -2, 0], [1, 1, 1, 0, 0]]).expand(1, 2, 2, 5)
    assert torch.equal(seen.blank_(x), blank)
    assert seen.least(x)[0, 0].tolist() == [-2.0, 1.0]
    assert seen.lower_(x).amax(-1)[0, 0].tolist() == [1.0, 1.0]
    assert x.isfinite().all()  # 0 times it is 0
    assert seen.counts(2, x.device).flatten().tolist() == [4, 3]


def test_rows_of_a_kernel_by_hand_some_see_no_key_and_some_do_not_count() -> None:
    # [b h t] = [2 1 3]: the last row of the first sequence sees no key, the first row of the second does not count.
    given = KernelRows(
        largest=torch.tensor([[[1.0, 5.0, -torch.inf]], [[9.0, 2.0, 3.0]]]),
        lse=torch.tensor([[[1.0, 6.0, -torch.inf]], [[9.5, 2.5, 3.5]]]),
        entropy=torch.tensor([[[0.5, 1.5, 0.0]], [[7.0, 0.25, 0.75]]]),
    )
    counted = torch.tensor([[True, True, True], [False, True, True]])
    stats = reduce_kernel_rows(given, counted, 1)
    assert stats.n_queries.tolist() == [4]
    assert stats.max_logit.tolist() == [5.0]
    assert stats.entropy.tolist() == [0.75]
    assert stats.entropy_min.tolist() == [0.25]


def test_a_threshold_is_passed_by_what_is_larger_and_a_cosine_is_never_under_minus_1() -> (
    None
):
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, math.log(3.0)], [5.0, 0.0]]]], dtype=torch.float64)
    # Logits [1] and [ln 3, 0].
    call = make_call(AttentionSpec(scale=Fixed(1.0)), q, k, k)
    for threshold, share in (
        (-0.5, 1.0),
        (0.0, 2 / 3),
        (0.5, 2 / 3),
        (1.0, 1 / 3),
        (1.2, 0.0),
    ):
        assert logit_stats(call, threshold).share_above.item() == pytest.approx(
            share
        ), threshold
    q = torch.randn(1, 1, 400, 3)
    apart = make_call(
        AttentionSpec(),
        q,
        -3 * q,
        q,
        causal=False,
        mask=torch.eye(400, dtype=torch.bool),
    )
    stats = logit_stats(apart)
    assert -1 <= stats.cos_max.item() <= -0.999
    assert -1 <= stats.cos_mean.item() <= -0.999


def test_one_row_of_a_kernel_is_its_own_mean_and_no_row_is_nothing() -> None:
    one = torch.tensor([[[1.5, 4.0]]])
    found = reduce_kernel_rows(
        KernelRows(one, one, one), torch.tensor([[True, False]]), 1
    )
    assert (found.entropy.item(), found.max_logit.item(), found.n_queries.item()) == (
        1.5,
        1.5,
        1,
    )
    nothing = reduce_kernel_rows(
        KernelRows(one, one, one), torch.tensor([[False, False]]), 1
    )
    assert (
        nothing.entropy.item(),
        nothing.entropy_min.item(),
        nothing.n_queries.item(),
    ) == (0.0, torch.inf, 0)
    wrong = torch.tensor([[[torch.nan, 1.0]]])
    assert (
        reduce_kernel_rows(KernelRows(wrong, wrong, wrong), None, 1)
        .max_logit.isnan()
        .all()
    )


def test_norms_of_keys_are_of_those_that_a_counted_row_sees() -> None:
    norm = torch.tensor([[[3.0, torch.nan, 1.0]], [[4.0, 8.0, 9.0]]])
    seen = torch.tensor([[[True, False, True]], [[True, False, False]]])
    some, every = (
        statistics._keys(norm, seen, norm),
        statistics._keys(norm[1:], None, norm),
    )
    assert [x.tolist() for x in some.values()] == [[pytest.approx(8 / 3)], [4.0], [3]]
    assert [x.tolist() for x in every.values()] == [[7.0], [9.0], [3]]
    nobody = (
        statistics._keys(None, seen, norm),
        statistics._keys(norm[..., :0], None, norm),
    )
    assert [[x.tolist() for x in found.values()] for found in nobody] == [
        [[0.0], [0.0], [0]]
    ] * 2
