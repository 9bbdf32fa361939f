"""What a clip, a cap or another scale would do to a head, from a few rows of its logits, is what it does."""

import dataclasses
import math
import re

import pytest
import torch
from tests.conformance.test_scores_statistics import by_hand
from tests.contract.conformance.cases import widened
from tests.kernels.drawn import drawn, mask_of_pairs

from qkeel.capture.calls import HeadLayout
from qkeel.reference import attend_call
from qkeel.sites import logit_sample
from qkeel.sites.logit_sample import LogitSample
from qkeel.spec import AttentionSpec, Sink, Softcap
from qkeel.spec.call import make_call

NUMBER = r"(\d\S*)"
WORDS = re.compile(
    rf"take the entropy from {NUMBER} to {NUMBER} nats and the gradient that its softmax passes back from {NUMBER} to "
    rf"{NUMBER} of uniform attention"
)


def measured(call, head, rows):
    """Mean entropy and what is passed back of the last rows of the first sequence, in float64; NaN without such rows."""
    truth = attend_call(call)
    p, seen = (x[0, head, -rows:] for x in (truth.weights, truth.logits > -torch.inf))
    n = seen.sum(-1).double()
    free = n > 1
    if call.query_mask is not None:
        free = free & call.query_mask[0, -rows:]
    entropy = torch.special.entr(p).sum(-1)
    passed = (p * (1 - p)).sum(-1) / (1 - 1 / n)
    return [float(x[free].mean()) for x in (entropy, passed)]


@pytest.mark.parametrize("written", [False, True])
def test_the_words_are_what_the_changed_call_has(written):
    said = 0
    for seed in range(40):
        call = drawn(seed, mask_of_pairs, sizes=(0.5, 3.0, 20.0))
        spec = call.spec
        wide = widened(call)
        rows = min(64, call.q.shape[2])
        changes = {"cap": 5.0} if seed % 2 else {"factor": 0.2}
        after = dataclasses.replace(wide, q=0.2 * wide.q)
        if "cap" in changes:
            cap = dataclasses.replace(spec, cap=Softcap(5.0))
            after = dataclasses.replace(wide, spec=cap)
        elif spec.norm.kind != "none":
            continue
        if written:
            call = dataclasses.replace(by_hand(wide), query_mask=call.query_mask)
        sample = LogitSample.of(call)
        assert sample is not None
        for head in range(wide.q.shape[1]):
            words = WORDS.match(sample.effect(head, **changes))
            pairs = zip(measured(wide, head, rows), measured(after, head, rows))
            expected = [x for pair in pairs for x in pair]
            if words is None:
                assert any(map(math.isnan, expected)), seed
                continue
            said += 1
            # Two digits are printed, and half precision rounds.
            near = pytest.approx(expected, rel=0.07, abs=5e-3)
            assert [float(x) for x in words.groups()] == near, seed
    assert said > 40


def test_a_long_row_leaves_fewer_rows_and_what_has_no_softmax_over_keys_has_no_sample(
    monkeypatch,
):
    q = torch.randn(2, 4, 100, 8)
    call = make_call(AttentionSpec(), q, q, q)
    for most, rows in ((1 << 22, 64), (4 * 100 * 3, 3), (1, 1)):
        monkeypatch.setattr(logit_sample, "LOGITS", most)
        sample = LogitSample.of(call)
        assert sample.logits.shape == (1, 4, rows, 100)
        assert f"(last {rows} queries)" in sample.effect(2, factor=0.5)
    sink = AttentionSpec(normalizer=Sink())
    params = sink.init_params(4, 4, 8)
    assert LogitSample.of(make_call(sink, q, q, q, params=params)) is None
    assert LogitSample.of(make_call(AttentionSpec(), q[:, :, :0], q, q)) is None
    # One head of several, which are computed one by one.
    single = HeadLayout(groups=("b", "t", "s"), headless=True)
    written = by_hand(make_call(AttentionSpec(), q, q, q))
    assert LogitSample.of(dataclasses.replace(written, layout=single)) is None


def test_what_a_program_does_to_its_scores_afterwards_is_not_seen():
    q = torch.randn(1, 2, 9, 8)
    written = by_hand(make_call(AttentionSpec(), q, q, q))
    sample = LogitSample.of(written)
    before = sample.effect(0, factor=0.1)
    written.logits.fill_(7.0)
    assert before == sample.effect(0, factor=0.1) != ""
