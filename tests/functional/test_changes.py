"""The change of logits by a step, against the T×T matrices in float64."""

import dataclasses

import pytest
import torch

from qkeel import preset
from qkeel.capture.calls import ScoresCall
from qkeel.errors import RefusedError, ShapeError
from qkeel.kernels.statistics import logit_change, score_change
from qkeel.reference import attend_call
from qkeel.spec import AttentionSpec, Learned, NoPosition
from qkeel.spec.call import make_call, with_query_mask

from .properties import randn

PADDED = torch.arange(9) >= torch.tensor([0, 4])[:, None]
NEAR = torch.arange(9)[:, None] - torch.arange(9) < 3
SOME_ROWS = (torch.arange(9) > 2)[:, None].expand(9, 9)
MASKS = {
    "full": {"causal": False},
    "causal": {},
    "left padding": {"mask": PADDED},
    "window": {"mask": NEAR[None, None]},
    "empty rows": {"mask": SOME_ROWS[None, None]},
}


def two_calls(spec, **options):
    """Two sequences of nine tokens, four heads, two key heads, before and after a small step."""
    q, k = randn(0, 2, 4, 9, 4), randn(1, 2, 2, 9, 4)
    new = q + 1e-3 * randn(2, *q.shape), k + 1e-3 * randn(3, *k.shape)
    calls = []
    for moved, (query, key) in ((0.0, (q, k)), (1e-3, new)):
        params = spec.init_params(4, 2, 4).items()
        params = {name: p.double() + moved for name, p in params}
        calls.append(make_call(spec, query, key, key, params=params, **options))
    return calls


def check(change, before, after):
    old, new = attend_call(before).logits, attend_call(after).logits
    visible = new > -torch.inf
    if after.query_mask is not None:
        visible = visible & after.query_mask[:, None, :, None]
    for h in range(4):
        exact = (new - old)[:, h][visible[:, h]]
        n = exact.numel()
        assert change.n_pairs[h] == n
        rms = float(exact.square().mean().sqrt()) if n else 0.0
        assert float(change.rms[h]) == pytest.approx(rms, rel=1e-9)


def written_out(call):
    """The call as scores that its author computes and normalises by hand."""
    logits = attend_call(call).logits
    hidden = logits == -torch.inf
    scores = {"logits": logits, "capped": logits.masked_fill(hidden, 0.0)}
    return ScoresCall(spec=call.spec, **scores, mask=~hidden, q=None, k=None)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["baseline", "qwen3", "cosa_logn", "gemma2"])
def test_the_change_over_visible_pairs_is_that_of_the_whole_matrices(name, mask):
    before, after = two_calls(preset(name), **MASKS[mask])
    scores = written_out(before), written_out(after)
    counted = torch.arange(18).view(2, 9) % 3 > 0
    check(logit_change(before, after), before, after)
    check(score_change(*scores), before, after)
    for rows in (counted, torch.zeros_like(counted)):
        masked = with_query_mask(after, rows)
        check(logit_change(before, masked), before, masked)
        by_hand = with_query_mask(scores[1], rows)
        check(score_change(scores[0], by_hand), before, masked)


def test_what_a_learned_scale_and_a_moving_bias_do_is_in_the_change():
    spec = AttentionSpec(scale=Learned(init=0.4, per="head"))
    before, after = two_calls(spec, mask=randn(5, 1, 4, 9, 9))
    assert after.mask is not None
    after = dataclasses.replace(after, mask=after.mask + 1e-2 * randn(6, 1, 4, 9, 9))
    check(logit_change(before, after), before, after)


def test_bad_pairs_of_calls_are_refused():
    before, after = two_calls(AttentionSpec())
    short = [x[:, :, :5] for x in (after.q, after.k, after.v)]
    with pytest.raises(ShapeError, match="two calls on the same batch"):
        logit_change(before, make_call(AttentionSpec(), *short))

    class Unfolded(NoPosition):
        folds = False

    spec = AttentionSpec(position=Unfolded())
    calls = [dataclasses.replace(call, spec=spec) for call in (before, after)]
    with pytest.raises(RefusedError, match="cannot be computed"):
        logit_change(*calls)
