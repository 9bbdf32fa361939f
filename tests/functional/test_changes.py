"""The change of logits by a step, against the T×T matrices in float64; RMS of all pairs from small Gram matrices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from qkeel import preset
from qkeel.capture.calls import ScoresCall, scores_change
from qkeel.errors import RefusedError, ShapeError
from qkeel.functional.bounds import (
    LogitChange,
    change_rows,
    no_change_rows,
    reduce_changes,
)
from qkeel.functional.statistics import VisibleKeys
from qkeel.kernels.statistics import logit_change
from qkeel.reference import attend_call
from qkeel.spec import AttentionCall, AttentionSpec, Learned, NoPosition
from qkeel.spec.call import make_call, with_query_mask

from .properties import randn

BASELINE = AttentionSpec()
PADDED = torch.arange(9) >= torch.tensor([0, 4])[:, None]
SEEN: dict[str, dict] = {
    "full": {"causal": False},
    "causal": {},
    "left padding": {"mask": PADDED},
    "right padding": {"mask": PADDED.flip(1), "causal": False},
    "window": {"mask": (torch.arange(9)[:, None] - torch.arange(9) < 3)[None, None]},
    "empty rows": {
        "mask": (torch.arange(9) > 2)[None, None, :, None]
        & torch.ones(9, 9, dtype=torch.bool)
    },
}


def step(
    seed: int, d: int = 4, size: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and those after a small step: two sequences, four heads, two key heads, nine tokens."""
    q, k = randn(seed, 2, 4, 9, d), randn(seed + 1, 2, 2, 9, d)
    return (
        q,
        k,
        q + size * randn(seed + 2, 2, 4, 9, d),
        k + size * randn(seed + 3, 2, 2, 9, d),
    )


def two_calls(
    spec: AttentionSpec = BASELINE, **how: object
) -> tuple[AttentionCall, AttentionCall]:
    q, k, q_new, k_new = step(0)
    params = {n: p.double() for n, p in spec.init_params(4, 2, 4).items()}
    moved = {n: p + 1e-3 for n, p in params.items()}
    return make_call(spec, q, k, k, params=params, **how), make_call(
        spec, q_new, k_new, k_new, params=moved, **how
    )  # type: ignore[arg-type]


def oracle(before: AttentionCall, after: AttentionCall) -> tuple[Tensor, Tensor]:
    """ΔS [h, pairs of all rows] with 0 at hidden pairs, and who sees whom."""
    z = [attend_call(call).logits for call in (before, after)]
    visible = z[1] > -torch.inf
    if after.query_mask is not None:
        visible = visible & after.query_mask[:, None, :, None]
    change = torch.where(
        visible, z[1].masked_fill(~visible, 0) - z[0].masked_fill(~visible, 0), 0.0
    )
    return change.transpose(0, 1).flatten(1), visible.transpose(0, 1).flatten(1)


def assert_is(found: LogitChange, change: Tensor, visible: Tensor) -> None:
    n = visible.sum(1)
    assert torch.equal(found.n_pairs, n)
    torch.testing.assert_close(
        found.rms, change.norm(dim=1) / n.double().sqrt(), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        found.mean_abs, change.abs().sum(1) / n, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(found.max_abs, change.abs().amax(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("name", ["baseline", "qwen3", "cosa_logn", "gemma2"])
def test_the_change_over_visible_pairs_is_that_of_the_whole_matrices(
    name: str, seen: str
) -> None:
    before, after = two_calls(preset(name), **SEEN[seen])
    assert_is(logit_change(before, after), *oracle(before, after))


def test_what_a_learned_scale_and_a_moving_bias_do_is_in_the_change() -> None:
    before, after = two_calls(
        AttentionSpec(scale=Learned(init=0.4, per="head")), mask=randn(5, 1, 4, 9, 9)
    )
    assert after.mask is not None
    after = dataclasses.replace(after, mask=after.mask + 1e-2 * randn(6, 1, 4, 9, 9))
    assert_is(logit_change(before, after), *oracle(before, after))


def test_rows_left_out_by_a_query_mask_do_not_count() -> None:
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    before, after = two_calls()
    after = with_query_mask(after, mask)
    assert_is(logit_change(before, after), *oracle(before, after))
    nothing = logit_change(before, with_query_mask(after, torch.zeros_like(mask)))
    assert (
        nothing.rms.tolist()
        == nothing.mean_abs.tolist()
        == nothing.max_abs.tolist()
        == [0.0] * 4
    )


@pytest.mark.parametrize("seen", SEEN)
def test_hand_written_scores_change_as_the_calls_do(seen: str) -> None:
    calls = two_calls(preset("gemma2"), **SEEN[seen])
    written = []
    for call in calls:
        logits = attend_call(call).logits
        hidden = logits == -torch.inf
        capped = logits.masked_fill(hidden, 0.0)
        written.append(
            ScoresCall(
                spec=call.spec,
                logits=logits,
                capped=capped,
                hidden=hidden,
                q=None,
                k=None,
            )
        )
    before, after = written
    found = scores_change(before, after)
    assert_is(found, *oracle(*calls))
    mask = torch.arange(9).expand(2, 9) % 2 == 0
    assert_is(
        scores_change(before, with_query_mask(after, mask)),
        *oracle(calls[0], with_query_mask(calls[1], mask)),
    )


def test_bad_pairs_of_calls_are_refused() -> None:
    before, after = two_calls()
    short = make_call(
        AttentionSpec(), *(x[:, :, :5] for x in (after.q, after.k, after.v))
    )
    with pytest.raises(ShapeError, match="two calls on the same batch"):
        logit_change(before, short)

    class Unfolded(NoPosition):
        folds = False

    spec = AttentionSpec(position=Unfolded())
    with pytest.raises(RefusedError, match="the change in q·k cannot be computed"):
        logit_change(
            dataclasses.replace(before, spec=spec),
            dataclasses.replace(after, spec=spec),
        )


def test_rows_that_see_no_key_add_nothing_to_those_that_do() -> None:
    change = torch.tensor([[[[3.0, 4.0], [0.0, -1.0]]]], dtype=torch.float64)
    like = torch.ones(1, 1, 2, dtype=torch.float64)
    rows = change_rows(change.clone(), VisibleKeys(None, 2, 2))
    found = reduce_changes([no_change_rows(like), rows, no_change_rows(like)], None)
    assert (found.n_pairs.item(), found.max_abs.item(), found.mean_abs.item()) == (
        4,
        4.0,
        2.0,
    )
    assert found.rms.item() == pytest.approx((26 / 4) ** 0.5)
    one = reduce_changes(
        [change_rows(change[:, :, :1, :1].clone(), VisibleKeys(None, 1, 1))], None
    )
    assert (
        one.n_pairs.item(),
        one.rms.item(),
        one.mean_abs.item(),
        one.max_abs.item(),
    ) == (1, 3.0, 3.0, 3.0)
    nothing = reduce_changes([no_change_rows(like)], torch.tensor([[True, False]]))
    assert [
        x.tolist()
        for x in (nothing.rms, nothing.mean_abs, nothing.max_abs, nothing.n_pairs)
    ] == [[0.0]] * 3 + [[0]]
