"""A hand-written attention gives the statistics that the same attention gives as an AttentionCall."""

import dataclasses

import pytest
import torch
from tests.quick import one_in
from torch.testing import assert_close

from qkeel.capture.calls import ScoresCall
from qkeel.functional.statistics import TENSORS, LogitStats
from qkeel.kernels import statistics
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.reference import attend_call
from qkeel.spec import NoCap
from qkeel.spec.call import with_query_mask

from .cases import SOME, SPECS, calls, share

SOFT = [name for name, spec in SPECS.items() if spec.normalizer.softmax_over_keys]
OPERANDS = ("qk_frobenius", "cos_max", "cos_mean", "n_products")


def by_hand(call):
    """The call as scores that go into a softmax; what is hidden may hold anything there."""
    logits = attend_call(call).logits
    hidden, (q, k) = logits == -torch.inf, call.encoded()
    bias, t, s = None, q.shape[2], k.shape[2]
    if call.is_biased:
        # What is added, as the difference that it makes.
        every = slice(0, t), slice(0, s)
        bias = call.scores(q, k, *every) - call.unbiased(q, k, *every)
    logits = logits.masked_fill(hidden, 1e3)
    capped = logits if isinstance(call.spec.cap, NoCap) else call.spec.cap.apply(logits)
    sink = call.sink
    return ScoresCall(
        spec=call.spec,
        logits=logits,
        capped=capped,
        mask=~hidden if hidden.any() else None,
        q=q,
        k=k,
        sink=None if sink is None else sink.to(logits).expand(*logits.shape[:3]),
        bias=bias,
    )


def assert_same(ours, theirs, fields, case):
    for name in fields:
        values = getattr(ours, name), getattr(theirs, name)
        message = f"{name}, {case}"
        assert_close(*values, rtol=1e-11, atol=1e-11, msg=message)


@pytest.mark.parametrize("name", one_in(SOFT, 4))
def test_scores_give_the_statistics_of_the_call(name):
    for case, call in calls(SPECS[name], torch.float64, share(name, 2), seed=20):
        written = by_hand(call)
        before = written.logits.clone()
        assert_same(logit_stats(written, 1.0), logit_stats(call, 1.0), TENSORS, case)
        assert torch.equal(written.logits, before), case


def test_a_query_mask_leaves_out_the_same_rows_of_blocks_and_maxima_alone_are_those_of_all(
    monkeypatch,
):
    monkeypatch.setattr(statistics, "BLOCK", 60)
    monkeypatch.setattr(statistics, "ROWS", 1)
    for case, call in calls(SPECS["gemma2"], torch.float64, SOME, seed=22):
        mask, written = torch.rand(call.query_shape) < 0.6, by_hand(call)
        masked = with_query_mask(written, mask)
        exact = logit_stats(with_query_mask(call, mask))
        assert_same(logit_stats(masked), exact, TENSORS, case)
        assert with_query_mask(written, mask[:1]) is written
        for scored in (written, masked):
            stats, extremes = logit_stats(scored), max_stats(scored)
            for name in ("max_logit", "min_logit", "logit_spread"):
                assert torch.equal(getattr(extremes, name), getattr(stats, name)), case


def test_what_needs_unknown_queries_or_keys_is_not_measured_and_says_so_by_its_count():
    known = ("max_logit", "entropy", "sink_share", "n_pairs", "n_free")
    for case, call in calls(SPECS["baseline"], torch.float64, SOME, seed=24):
        written, exact = by_hand(call), logit_stats(call)
        heads, groups = len(exact.max_logit), len(exact.key_norm)
        empty = LogitStats.empty(heads, groups, exact.max_logit)
        for missing, other in (("q", "key_norm"), ("k", "query_norm")):
            stats = logit_stats(dataclasses.replace(written, **{missing: None}))
            assert_same(stats, empty, OPERANDS, case)
            assert_same(stats, exact, (*known, other), case)
            norms = stats.query_norm if missing == "q" else stats.n_keys
            assert not norms.any(), case
