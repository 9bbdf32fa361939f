"""The largest and smallest logits from q and k alone are those of the exact statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.harness import rows_of
from tests.kernels.test_non_finite import BROKEN, broken_call
from tests.quick import one_in

from qkeel import preset
from qkeel.kernels.logits import gpu as gpu_statistics
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import ALiBi, AttentionCall, AttentionSpec, Rope, SlidingWindow, Softcap
from qkeel.spec.call import make_call, with_query_mask


def call_of(
    spec: AttentionSpec,
    t: int,
    s: int,
    dtype: torch.dtype,
    size: float = 1.0,
    **how: Any,
) -> AttentionCall:
    q, k, v = (
        torch.randn(2, heads, n, 24).to(dtype) for heads, n in ((4, t), (2, s), (2, s))
    )
    params = {n: p.to(dtype) for n, p in spec.init_params(4, 2, 24).items()}
    return make_call(spec, size * q, k, v, params=params, **how)


CASES: dict[str, tuple[AttentionSpec, int, int, dict[str, Any]]] = {
    "causal": (AttentionSpec(), 70, 70, {}),
    "one query": (AttentionSpec(), 1, 65, {}),
    "full": (AttentionSpec(position=Rope()), 7, 130, {"causal": False}),
    "norm": (preset("qwen3"), 20, 20, {}),
    "log n scale": (preset("cosa_logn"), 20, 20, {}),
    "more queries than keys": (AttentionSpec(), 9, 5, {}),
    "padding": (
        AttentionSpec(),
        12,
        12,
        {"mask": torch.arange(12) >= torch.tensor([[0], [5]])},
    ),
    "nothing to see": (
        AttentionSpec(),
        3,
        40,
        {"mask": torch.zeros(2, 40, dtype=torch.bool), "causal": False},
    ),
    "softcap": (AttentionSpec(cap=Softcap(5.0)), 33, 33, {}),
    "window": (AttentionSpec(position=SlidingWindow(window=9)), 80, 80, {}),
    "window both ways": (
        AttentionSpec(position=SlidingWindow(window=9)),
        40,
        80,
        {"causal": False},
    ),
}


@pytest.mark.parametrize("name", one_in(CASES, 4))
def test_the_extremes_of_a_call_are_those_of_the_whole_matrix(
    name: str, through_triton: list[Any]
) -> None:
    spec, t, s, how = CASES[name]
    call = call_of(spec, t, s, torch.float32, **how)
    rows, ours = rows_of(call, True), max_stats(call)
    for mine, true in (
        (ours.max_logit, rows["largest"].amax((0, 2))),
        (ours.min_logit, rows["smallest"].amin((0, 2))),
    ):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
    assert through_triton


def test_the_extremes_of_counted_rows_are_those_of_the_statistics(
    through_triton: list[Any],
) -> None:
    for name in ("padding", "softcap", "norm"):
        spec, _, _, how = CASES[name]
        call = call_of(spec, 12, 12, torch.float32, **how)
        for counted in (
            None,
            torch.rand(2, 12) < 0.5,
            torch.zeros(2, 12, dtype=torch.bool),
        ):
            masked = call if counted is None else with_query_mask(call, counted)
            exact, ours = logit_stats(masked), max_stats(masked)
            for field in ("max_logit", "min_logit"):
                torch.testing.assert_close(
                    getattr(ours, field), getattr(exact, field), rtol=1e-5, atol=1e-6
                )
    assert len(through_triton) == 9


def test_q_and_k_that_nothing_changes_are_read_in_their_own_precision(
    through_triton: list[Any],
) -> None:
    bare, turned = (
        call_of(spec, 5, 5, torch.float16)
        for spec in (AttentionSpec(), AttentionSpec(position=Rope()))
    )
    for call in (bare, turned):
        ours, exact = max_stats(call), logit_stats(call)
        assert torch.allclose(ours.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)
        assert torch.allclose(ours.min_logit, exact.min_logit, rtol=1e-5, atol=1e-5)
    assert through_triton == [torch.float16, torch.float32]


def test_what_it_does_not_do_is_left_to_torch(through_triton: list[Any]) -> None:
    pos = torch.arange(5)
    for spec, how in (
        (AttentionSpec(), {"mask": torch.rand(5, 5) < 0.5}),
        (AttentionSpec(), {"mask": torch.randn(5, 5)}),
        (AttentionSpec(position=ALiBi()), {}),
        (AttentionSpec(), {"pos_q": pos, "pos_k": pos}),
    ):
        call = call_of(spec, 5, 5, torch.float32, **how)
        assert gpu_statistics.extremes(call) is None
        # All statistics of a mask of pairs come from a pass of Triton's: the same logits in another order of sums.
        torch.testing.assert_close(
            max_stats(call).max_logit, logit_stats(call).max_logit, rtol=1e-6, atol=1e-6
        )
    assert (
        gpu_statistics.extremes(call_of(AttentionSpec(), 5, 5, torch.float64)) is None
    )
    assert through_triton == []


@pytest.mark.usefixtures("_poisoned")
def test_tiles_that_every_row_sees_whole_and_a_negative_scale(
    through_triton: list[Any],
) -> None:
    call = call_of(AttentionSpec(), 80, 200, torch.float32, -3.0)
    ours, exact = max_stats(call), logit_stats(call)
    torch.testing.assert_close(ours.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)
    from qkeel.kernels.logits import triton_extremes as extremes

    largest, smallest = extremes.extremes(call.q, call.k, -1.0, causal=True)
    above, below = extremes.extremes(-call.q, call.k, 1.0, causal=True)
    assert torch.equal(largest, above)
    assert torch.equal(smallest, below)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered"
)  # numpy's, which multiplies for the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", one_in(BROKEN, 4))
def test_nan_and_overflow_show(kind: str, through_triton: list[Any]) -> None:
    told = torch.tensor([h in BROKEN[kind] for h in range(4)])
    for spec in (AttentionSpec(), AttentionSpec(cap=Softcap(5.0))):
        ours = max_stats(broken_call(kind, spec))
        assert torch.equal(
            ~(ours.max_logit.isfinite() & ours.min_logit.isfinite()), told
        )
