"""Properties of the statistics of rows, on random blocks with hidden pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkeel import attention, preset
from qkeel.functional import statistics
from qkeel.functional.bounds import change_rows, reduce_changes
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
    q = (size * randn(seed, 2, 4, 7, 3)).to(dtype)
    k = randn(seed + 1, 2, 2, 9, 3).to(dtype)
    k[:, :, 3] = q[:, ::2, 3]  # a cosine of 1 in exact arithmetic
    visible = some_visible(seed, 7, 9)
    call = make_call(AttentionSpec(), q, k, k, causal=False, mask=visible)
    stats = logit_stats(call, 1.0)
    assert (stats.cos_max.abs() <= 1).all()
    assert (stats.cos_mean.abs() <= 1).all()
    assert (stats.cos_mean <= stats.cos_max).all()
    for share in (stats.normalized_entropy, stats.sink_share, stats.share_above):
        assert ((share >= 0) & (share <= 1)).all()
    norms = [x.norm(dim=-1).amax((0, 2)) for x in (q, k)]
    most = norms[0] * norms[1].repeat_interleave(2) * stats.n_products.sqrt()
    assert (stats.qk_frobenius <= most * (1 + 1e-5)).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_uniform_attention_has_all_the_entropy_there_is_dropout_or_not(
    dropout,
):
    n, spec = 33, preset("baseline")
    q, k = torch.zeros(2, 3, 5, 8), torch.randn(2, 3, n, 8)
    options = {"causal": False, "dropout": dropout, "stats": True}
    stats = attention(q, k, k, spec=spec, **options)[1]
    assert stats.entropy.tolist() == pytest.approx([math.log(n)] * 3)
    assert stats.normalized_entropy.tolist() == pytest.approx([1.0] * 3)
    assert stats.sink_share.tolist() == pytest.approx([1 / n] * 3)
    assert stats.cos_mean.tolist() == [0.0] * 3


def test_worked_example_of_two_rows():
    # Logits [1] and [ln 3, 0] after the scale of 1: entropy of (3/4, 1/4), sink 3/4; q·k are 1, ln 3, 0.
    log = math.log(3)
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, log], [5.0, 0.0]]]], dtype=torch.float64)
    call = make_call(AttentionSpec(scale=Fixed(1.0)), q, k, k)
    stats, norm = logit_stats(call, 1.05), math.sqrt(1 + log**2)
    entropy = math.log(4) - 0.75 * log
    for value, exact in (
        (stats.entropy, entropy / 2),
        (stats.entropy_min, 0.0),
        (stats.normalized_entropy, entropy / math.log(2)),
        (stats.sink_share, 0.75),
        (stats.qk_frobenius, norm),
        (stats.cos_max, log / norm),
        (stats.cos_mean, (1 + log) / norm / 3),
        (stats.key_norm, (norm + 5.0) / 2),
        (stats.key_norm_max, 5.0),
        # Of the one row that sees two keys.
        (stats.logit_gap, log / 2),
        (stats.logit_spread, log / 2),
        (stats.n_free, 1),
        (stats.n_products, 3),
    ):
        assert value.item() == pytest.approx(exact)
    for threshold, share in ((-0.5, 3), (0.0, 2), (0.5, 2), (1.0, 1), (1.2, 0)):
        above = logit_stats(call, threshold).share_above.item()
        assert above == pytest.approx(share / 3), threshold


def test_a_row_of_one_key_has_no_entropy_and_a_cosine_is_never_under_minus_1():
    q, alone = torch.randn(1, 1, 400, 3), torch.eye(400, dtype=torch.bool)
    call = make_call(AttentionSpec(), q, -3 * q, q, causal=False, mask=alone)
    stats = logit_stats(call)
    assert stats.entropy.item() == 0
    assert stats.n_free.item() == 0
    assert stats.normalized_entropy.item() == 0
    assert -1 <= stats.cos_max.item() <= -0.999
    assert -1 <= stats.cos_mean.item() <= -0.999


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf, 3.0])
def test_hidden_places_are_blanked_whatever_stands_there(rubbish):
    x = torch.full((1, 2, 2, 5), rubbish)
    x[..., :3] = 1.0
    x[..., 0, 3] = -2.0
    shown = torch.tensor([[True, False], [False, False]])[None, None]
    visible_keys = VisibleKeys(shown, 3, 5)
    blank = torch.tensor([[1.0, 1, 1, -2, 0], [1, 1, 1, 0, 0]]).expand(1, 2, 2, 5)
    assert torch.equal(visible_keys.blank_(x), blank)
    assert visible_keys.least(x)[0, 0].tolist() == [-2.0, 1.0]
    assert visible_keys.lower_(x).amax(-1)[0, 0].tolist() == [1.0, 1.0]
    assert x.isfinite().all()  # 0 times it is 0
    assert visible_keys.counts(2, x.device).flatten().tolist() == [4, 3]


def test_rows_of_a_kernel_by_hand_some_see_no_key_and_some_do_not_count():
    # [b h t] = [2 1 3]: the last row of the first sequence sees no key, the first row of the second does not count.
    rows = KernelRows(
        largest=torch.tensor([[[1.0, 5.0, -torch.inf]], [[9.0, 2.0, 3.0]]]),
        lse=torch.tensor([[[1.0, 6.0, -torch.inf]], [[9.5, 2.5, 3.5]]]),
        entropy=torch.tensor([[[0.5, 1.5, 0.0]], [[7.0, 0.25, 0.75]]]),
    )
    counted = torch.tensor([[True, True, True], [False, True, True]])
    one = torch.tensor([[True, False, False], [False, False, False]])
    for mask, numbers in (
        (counted, (4, 5.0, 0.75, 0.25)),
        (one, (1, 1.0, 0.5, 0.5)),
        (torch.zeros_like(one), (0, -torch.inf, 0.0, torch.inf)),
    ):
        stats = reduce_kernel_rows(rows, mask, 1)
        values = stats.n_queries, stats.max_logit, stats.entropy, stats.entropy_min
        assert tuple(x.item() for x in values) == numbers
    lost = torch.tensor([[[torch.nan, 1.0]]])
    stats = reduce_kernel_rows(KernelRows(lost, lost, lost), None, 1)
    assert stats.max_logit.isnan().all()


def test_changes_of_rows_by_hand():
    change = torch.tensor([[[[3.0, 4.0], [0.0, -1.0]]]], dtype=torch.float64)
    hidden = VisibleKeys(torch.zeros(1, 1, 2, 1, dtype=torch.bool), 0, 1)
    nothing = change_rows(torch.zeros(1, 1, 2, 1, dtype=torch.float64), hidden)
    rows = change_rows(change.clone(), VisibleKeys(None, 2, 2))
    single = change_rows(change[:, :, :1, :1].clone(), VisibleKeys(None, 1, 1))
    for parts, mask, numbers in (
        ([nothing, rows, nothing], None, (4, (26 / 4) ** 0.5, 2.0, 4.0)),
        ([single], None, (1, 3.0, 3.0, 3.0)),
        ([nothing], torch.tensor([[True, False]]), (0, 0.0, 0.0, 0.0)),
    ):
        found = reduce_changes(parts, mask)
        values = found.n_pairs, found.rms, found.mean_abs, found.max_abs
        assert [x.item() for x in values] == pytest.approx(numbers)


def test_norms_of_keys_are_of_those_that_a_counted_row_sees():
    norm = torch.tensor([[[3.0, torch.nan, 1.0]], [[4.0, 8.0, 9.0]]])
    visible = torch.tensor([[[True, False, True]], [[True, False, False]]])
    for arguments, numbers in (
        ((norm, visible), (8 / 3, 4.0, 3)),
        ((norm[1:], None), (7.0, 9.0, 3)),
        ((None, visible), (0.0, 0.0, 0)),
        ((norm[..., :0], None), (0.0, 0.0, 0)),
    ):
        values = statistics._keys(*arguments, norm).values()  # type: ignore[arg-type]
        assert [x.item() for x in values] == pytest.approx(numbers)
