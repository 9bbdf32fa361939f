"""A hand-written attention gives the statistics that the same attention gives as an AttentionCall."""

import dataclasses

import pytest
import torch
from tests.quick import one_in

from qkeel.capture import calls as scores
from qkeel.capture.calls import ScoresCall, scores_maxima, scores_stats
from qkeel.functional.statistics import TENSORS, LogitStats
from qkeel.kernels.statistics import logit_stats, sink_logit
from qkeel.reference import attend_call
from qkeel.spec import NoCap
from qkeel.spec.call import with_query_mask

from .cases import SOME, SPECS, calls, share

SOFT = [name for name, spec in SPECS.items() if spec.normalizer.softmax_over_keys]
FIELDS = list(TENSORS)
OPERANDS = ("qk_frobenius", "cos_max", "cos_mean", "n_products")


def by_hand(call):
    """The call as scores that go into a softmax; what is hidden may hold anything there."""
    logits = attend_call(call).logits
    hidden, (q, k) = logits == -torch.inf, call.encoded()
    logits = logits.masked_fill(hidden, 1e3)
    capped = logits if isinstance(call.spec.cap, NoCap) else call.spec.cap.apply(logits)
    sink = sink_logit(call.spec.normalizer, call.params, q)
    return ScoresCall(
        spec=call.spec,
        logits=logits,
        capped=capped,
        hidden=hidden if hidden.any() else None,
        q=q,
        k=k,
        sink=None if sink is None else sink.to(logits).expand(*logits.shape[:3]),
    )


def assert_same(ours, theirs, fields, case):
    for name in fields:
        torch.testing.assert_close(
            getattr(ours, name),
            getattr(theirs, name),
            rtol=1e-11,
            atol=1e-11,
            msg=f"{name}, {case}",
        )


@pytest.mark.parametrize("name", one_in(SOFT, 4))
def test_scores_give_the_statistics_of_the_call(name):
    for case, call in calls(SPECS[name], torch.float64, share(name, 2), seed=20):
        written = by_hand(call)
        before = written.logits.clone()
        assert_same(scores_stats(written, 1.0), logit_stats(call, 1.0), FIELDS, case)
        assert torch.equal(written.logits, before), case


def test_a_query_mask_leaves_out_the_same_rows_of_blocks(monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 60)
    for case, call in calls(SPECS["gemma2"], torch.float64, SOME, seed=22):
        mask = torch.rand(call.query_shape) < 0.6
        written = by_hand(call)
        masked = with_query_mask(written, mask)
        assert masked.query_mask is not None
        assert_same(
            scores_stats(masked), logit_stats(with_query_mask(call, mask)), FIELDS, case
        )
        assert with_query_mask(written, mask[:1]) is written


def test_maxima_alone_are_those_of_the_full_statistics():
    for case, call in calls(SPECS["gemma2"], torch.float32, SOME, seed=23):
        for written in (
            by_hand(call),
            with_query_mask(by_hand(call), torch.rand(call.query_shape) < 0.5),
        ):
            full, (top, low) = scores_stats(written), scores_maxima(written)
            assert torch.equal(top, full.max_logit), case
            assert torch.equal(low, full.min_logit), case


def test_what_needs_unknown_queries_or_keys_is_not_measured_and_says_so_by_its_count():
    for case, call in calls(SPECS["baseline"], torch.float64, SOME, seed=24):
        written, exact = by_hand(call), logit_stats(call)
        empty = LogitStats.empty(
            len(exact.max_logit), len(exact.key_norm), exact.max_logit
        )
        no_queries = scores_stats(dataclasses.replace(written, q=None))
        no_keys = scores_stats(dataclasses.replace(written, k=None))
        for stats in (no_queries, no_keys):
            assert_same(stats, empty, list(OPERANDS), case)
            assert_same(
                stats,
                exact,
                ["max_logit", "entropy", "sink_share", "n_pairs", "n_free"],
                case,
            )
        assert no_queries.query_norm.tolist() == [0.0] * len(exact.max_logit), case
        assert_same(no_queries, exact, ["key_norm"], case)
        assert no_keys.n_keys.tolist() == [0] * len(exact.max_logit), case
        assert_same(no_keys, exact, ["query_norm"], case)
