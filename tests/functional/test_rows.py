"""Properties of the statistics of rows, on random blocks with hidden pairs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each_row import each_row

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
def test_cosines_shares_and_normalised_entropies_stay_in_their_ranges(seed: int, size: float, single: bool) -> None:
    dtype = torch.float32 if single else torch.float64
    q, k = (size * randn(seed, 2, 4, 7, 3)).to(dtype), randn(seed + 1, 2, 2, 9, 3).to(dtype)
    k[:, :, 3] = q[:, ::2, 3]  # a cosine of 1 in exact arithmetic
    call = make_call(AttentionSpec(), q, k, k, causal=False, mask=some_visible(seed, 7, 9))
    stats = logit_stats(call, 1.0)
    assert (stats.cos_max.abs() <= 1).all()
    assert (stats.cos_mean.abs() <= 1).all()
    assert (stats.cos_mean <= stats.cos_max).all()
    for share in (stats.normalized_entropy, stats.sink_share, stats.share_above):
        assert ((share >= 0) & (share <= 1)).all()
    most = q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2)).repeat_interleave(2)
    assert (stats.qk_frobenius <= most * stats.n_products.sqrt() * (1 + 1e-5)).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_uniform_attention_has_all_the_entropy_there_is_dropout_or_not(dropout: float) -> None:
    n = 33
    q, k = torch.zeros(2, 3, 5, 8), torch.randn(2, 3, n, 8)
    stats = attention(q, k, k, spec=preset("baseline"), causal=False, dropout=dropout, stats=True)[1]
    torch.testing.assert_close(stats.entropy, torch.full((3,), math.log(n)))
    torch.testing.assert_close(stats.normalized_entropy, torch.ones(3))
    torch.testing.assert_close(stats.sink_share, torch.full((3,), 1 / n))
    assert stats.cos_mean.tolist() == [0.0] * 3


def test_worked_example_of_two_rows() -> None:
    # Logits [1] and [ln 3, 0] after the scale of 1: entropy of (3/4, 1/4), sink 3/4; q·k are 1, ln 3, 0.
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, math.log(3.0)], [5.0, 0.0]]]], dtype=torch.float64)
    stats = logit_stats(make_call(AttentionSpec(scale=Fixed(1.0)), q, k, k), threshold=1.05)
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
    assert stats.key_norm_by_position[0, :3].tolist() == pytest.approx([norm, 5.0, 0.0])
    assert stats.n_keys_by_position[0].tolist() == [1, 1] + [0] * 22


def test_keys_are_put_in_bins_of_powers_of_two_from_the_first_visible_one() -> None:
    k = torch.arange(1.0, 21.0).view(1, 1, 20, 1)
    padded = torch.arange(20) >= 3
    stats = logit_stats(make_call(AttentionSpec(), k, k, k, causal=True, mask=padded[None]))
    assert stats.n_keys_by_position[0].tolist() == [1, 1, 2, 4, 8, 1] + [0] * 18
    assert stats.key_norm_by_position[0, :6].tolist() == [4.0, 5.0, 6.5, 9.5, 15.5, 20.0]


def test_a_row_of_one_key_has_no_entropy_at_all() -> None:
    q = torch.randn(1, 1, 6, 4)
    stats = logit_stats(make_call(AttentionSpec(), q, q, q, causal=False, mask=torch.eye(6, dtype=torch.bool)))
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


@each_row("packed", [False, True])
def test_keys_are_binned_by_the_distance_from_the_first_seen_one_of_their_sequence(packed: bool) -> None:
    """Against loops over keys; some sequences have no key that is seen, and tokens of -2 are of none."""
    rng = torch.Generator().manual_seed(3)
    of_key = torch.tensor([0] * 6 + [1] + [2] * 9 + [4] * 40 + [-2] * 3) if packed else None
    norm, seen = torch.rand(2, 3, 59, generator=rng).double(), torch.rand(2, 3, 59, generator=rng) < 0.6
    seen[:, 0, :7], seen[0, 1], seen[1, 2, 16:] = False, False, False
    norm[0, 0, 0] = torch.nan  # of a key that nobody sees
    found = statistics._keys(norm, seen, of_key, norm)
    sums, counts = torch.zeros(3, 24, dtype=torch.float64), torch.zeros(3, 24, dtype=torch.int64)
    for b, g in itertools.product(range(2), range(3)):
        first: dict[int, int] = {}
        for j in seen[b, g].nonzero().flatten().tolist():
            start = first.setdefault(0 if of_key is None else int(of_key[j]), j)
            place = 0 if j == start else (j - start).bit_length()
            sums[g, place] += norm[b, g, j]
            counts[g, place] += 1
    assert torch.equal(found["n_keys_by_position"], counts)
    torch.testing.assert_close(found["key_norm_by_position"], sums / counts.clamp_min(1))
    kept = norm.masked_fill(~seen, 0.0)
    assert torch.equal(found["n_keys"], seen.sum((0, 2)))
    torch.testing.assert_close(found["key_norm"], kept.sum((0, 2)) / seen.sum((0, 2)))
    torch.testing.assert_close(found["key_norm_max"], kept.amax((0, 2)))
    unknown = statistics._keys(None, seen, of_key, norm)
    assert [float(x.abs().sum()) for x in unknown.values()] == [0.0] * 5


def test_a_threshold_is_passed_by_what_is_larger_and_a_cosine_is_never_under_minus_1() -> None:
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, math.log(3.0)], [5.0, 0.0]]]], dtype=torch.float64)
    call = make_call(AttentionSpec(scale=Fixed(1.0)), q, k, k)  # logits [1] and [ln 3, 0]
    for threshold, share in ((-0.5, 1.0), (0.0, 2 / 3), (0.5, 2 / 3), (1.0, 1 / 3), (1.2, 0.0)):
        assert logit_stats(call, threshold).share_above.item() == pytest.approx(share), threshold
    q = torch.randn(1, 1, 400, 3)
    apart = make_call(AttentionSpec(), q, -3 * q, q, causal=False, mask=torch.eye(400, dtype=torch.bool))
    stats = logit_stats(apart)
    assert -1 <= stats.cos_max.item() <= -0.999
    assert -1 <= stats.cos_mean.item() <= -0.999


def test_one_row_of_a_kernel_is_its_own_mean_and_no_row_is_nothing() -> None:
    one = torch.tensor([[[1.5, 4.0]]])
    found = reduce_kernel_rows(KernelRows(one, one, one), torch.tensor([[True, False]]), 1)
    assert (found.entropy.item(), found.max_logit.item(), found.n_queries.item()) == (1.5, 1.5, 1)
    nothing = reduce_kernel_rows(KernelRows(one, one, one), torch.tensor([[False, False]]), 1)
    assert (nothing.entropy.item(), nothing.entropy_min.item(), nothing.n_queries.item()) == (0.0, torch.inf, 0)
    wrong = torch.tensor([[[torch.nan, 1.0]]])
    assert reduce_kernel_rows(KernelRows(wrong, wrong, wrong), None, 1).max_logit.isnan().all()


@pytest.mark.parametrize(("queries", "keys", "causal"), [(7, 7, True), (7, 5, False), (3, 1, False), (1, 1, True)])
def test_rows_that_are_known_by_their_number_are_reduced_as_counted_ones(queries: int, keys: int, causal: bool) -> None:
    fields = randn(0, len(statistics.ROW_FIELDS), 2, 4, queries).abs()
    n_keys = torch.arange(1, queries + 1) if causal else torch.full((queries,), keys)
    counted = statistics.CountedRows.of(n_keys.expand(2, 4, -1), None, 0, fields.dtype)
    whole = statistics.whole_rows(2, queries, keys, causal, fields.dtype, fields.device)
    k_norm = randn(1, 2, 2, keys).abs()
    one = statistics.reduce_fields(fields, whole, k_norm, None)
    other = statistics.reduce_fields(fields, counted, k_norm, torch.ones(2, 2, keys, dtype=torch.bool))
    for name, x in one.tensors().items():
        torch.testing.assert_close(x, other.tensors()[name], rtol=1e-12, atol=0.0, msg=name)
