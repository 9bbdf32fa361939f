"""Statistics of calls that the public API cannot make: rows left out, other thresholds, blocks of a few rows."""

import pytest
import torch
from tests.contract.conformance.test_statistics import (
    FIELDS,
    assert_same,
    recomputed,
)
from tests.quick import one_in

from qkeel import preset
from qkeel.kernels import statistics
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.ops import run
from qkeel.spec.call import make_call, with_query_mask

from .cases import SOME, SPECS, calls, share, unchecked


@pytest.mark.parametrize(
    "name",
    one_in(["baseline", "qwen3", "gemma2", "cosa_logn", "capped_sink", "softpick"], 3),
)
def test_rows_that_a_query_mask_leaves_out_count_nowhere_and_attention_is_untouched(
    name, monkeypatch
):
    monkeypatch.setattr(statistics, "BLOCK", 40)
    monkeypatch.setattr(statistics, "ROWS", 1)
    rng = torch.Generator().manual_seed(3)
    for case, call in calls(SPECS[name], torch.float64, SOME, seed=11):
        mask = torch.rand(call.query_shape, generator=rng) < 0.6
        masked = with_query_mask(call, mask)
        assert_same(
            logit_stats(masked), recomputed(unchecked(call), counted=mask), 1e-11, case
        )
        assert torch.equal(run(masked), run(call)), case
        whole = with_query_mask(call, torch.ones_like(mask))
        assert_same(logit_stats(whole), recomputed(unchecked(call)), 1e-11, case)


@pytest.mark.parametrize("name", one_in(SPECS, 4))
def test_maxima_alone_are_those_of_the_full_statistics(name):
    for case, call in calls(SPECS[name], torch.float32, share(name, 2), seed=13):
        for c in (call, with_query_mask(call, torch.rand(call.query_shape) < 0.5)):
            full, largest = logit_stats(c), max_stats(c)
            assert torch.equal(largest.max_logit, full.max_logit), case
            assert torch.equal(largest.min_logit, full.min_logit), case


@pytest.mark.parametrize("threshold", one_in([1.5, -1.0, 0.0, 100.0], 2))
def test_the_share_above_is_of_signed_logits_before_the_cap(threshold):
    for name in ("baseline", "gemma2", "sink"):
        for case, call in calls(SPECS[name], torch.float64, SOME, seed=14):
            assert_same(
                logit_stats(call, threshold),
                recomputed(unchecked(call), threshold),
                1e-11,
                f"{name}, {case}",
            )


def test_what_stands_at_hidden_keys_and_rows_changes_nothing():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    seen = torch.tensor([[True, True, True, False, False]])
    for rubbish in (0.0, 1e30, torch.inf, -torch.inf, torch.nan):
        bad_q, bad_k = q.clone(), k.clone()
        bad_q[:, :, 3:], bad_k[:, :, 3:] = rubbish, rubbish
        for causal in (True, False):
            found = [
                logit_stats(
                    with_query_mask(
                        make_call(
                            preset("baseline"), x, y, y, causal=causal, mask=seen
                        ),
                        seen,
                    )
                )
                for x, y in ((q, k), (bad_q, bad_k))
            ]
            for field in FIELDS:
                assert torch.equal(*(getattr(stats, field) for stats in found)), (
                    f"{field}, {rubbish}"
                )
                assert getattr(found[1], field).isfinite().all(), f"{field}, {rubbish}"
