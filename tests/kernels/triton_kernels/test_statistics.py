"""Row statistics from q and k alone are those of the exact statistics and of the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.harness import check_rows, rows_of
from tests.kernels.test_non_finite import BROKEN, broken_call
from tests.quick import one_in

from qkeel import preset
from qkeel.functional.statistics import KernelRows, LogitStats
from qkeel.kernels import contract
from qkeel.kernels.statistics import (
    exact_bracket,
    logit_maxima,
    logit_stats,
    stats_of_rows,
)
from qkeel.spec import ALiBi, AttentionCall, AttentionSpec, Rope, SlidingWindow, Softcap
from qkeel.spec.call import make_call, with_query_mask


def call_of(spec: AttentionSpec, t: int, s: int, dtype: torch.dtype, size: float = 1.0, **how: Any) -> AttentionCall:
    q, k, v = (torch.randn(2, heads, n, 24).to(dtype) for heads, n in ((4, t), (2, s), (2, s)))
    params = {n: p.to(dtype) for n, p in spec.init_params(4, 2, 24).items()}
    return make_call(spec, size * q, k, v, params=params, **how)


CASES: dict[str, tuple[AttentionSpec, int, int, dict[str, Any]]] = {
    "causal": (AttentionSpec(), 70, 70, {}),
    "one query": (AttentionSpec(), 1, 65, {}),
    "full": (AttentionSpec(position=Rope()), 7, 130, {"causal": False}),
    "norm": (preset("qwen3"), 20, 20, {}),
    "log n scale": (preset("cosa_logn"), 20, 20, {}),
    "more queries than keys": (AttentionSpec(), 9, 5, {}),
    "padding": (AttentionSpec(), 12, 12, {"mask": torch.arange(12) >= torch.tensor([[0], [5]])}),
    "nothing to see": (AttentionSpec(), 3, 40, {"mask": torch.zeros(2, 40, dtype=torch.bool), "causal": False}),
    "softcap": (AttentionSpec(cap=Softcap(5.0)), 33, 33, {}),
    "window": (AttentionSpec(position=SlidingWindow(window=9)), 80, 80, {}),
    "window both ways": (AttentionSpec(position=SlidingWindow(window=9)), 40, 80, {"causal": False}),
}


@pytest.mark.parametrize("name", one_in(CASES, 4))
def test_every_row_is_that_of_the_whole_matrix(name: str, through_triton: list[Any]) -> None:
    spec, t, s, how = CASES[name]
    call = call_of(spec, t, s, torch.float32, **how)
    found = contract.row_statistics(call)
    assert found is not None
    check_rows(call, name, found)


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_entropies_at_large_logits_do_not_cancel(size: float, through_triton: list[Any]) -> None:
    call = call_of(AttentionSpec(), 33, 33, torch.float32, size)
    found = contract.row_statistics(call)
    assert found is not None
    true = rows_of(call, True)["entropy"]
    assert found.largest.max() > size
    assert (found.entropy >= 0).all()
    # A logit's rounding, 6e-8 of its size, is an error of the entropy of about as much.
    assert (found.entropy - true).abs().max() <= 2e-7 * float(found.largest.max()) + 2e-6


def test_largest_and_smallest_of_a_call_are_those_of_its_statistics(through_triton: list[Any]) -> None:
    for name in ("padding", "softcap", "norm"):
        spec, _, _, how = CASES[name]
        call = call_of(spec, 12, 12, torch.float32, **how)
        for counted in (None, torch.rand(2, 12) < 0.5, torch.zeros(2, 12, dtype=torch.bool)):
            masked = call if counted is None else with_query_mask(call, counted)
            exact, ours = logit_stats(masked), logit_maxima(masked)
            for a, b in zip(ours, (exact.max_logit, exact.min_logit)):
                assert torch.equal(a.isinf(), b.isinf())
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(through_triton) == 9


def test_q_and_k_that_nothing_changes_are_read_in_their_own_precision(through_triton: list[Any]) -> None:
    bare, turned = (call_of(spec, 5, 5, torch.float16) for spec in (AttentionSpec(), AttentionSpec(position=Rope())))
    for call in (bare, turned):
        top, low = logit_maxima(call)
        exact = logit_stats(call)
        assert torch.allclose(top, exact.max_logit, rtol=1e-5, atol=1e-5)
        assert torch.allclose(low, exact.min_logit, rtol=1e-5, atol=1e-5)
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
        assert contract.row_statistics(call) is None
        # All statistics of a mask of pairs come from a pass of Triton's: the same logits in another order of sums.
        torch.testing.assert_close(logit_maxima(call)[0], logit_stats(call).max_logit, rtol=1e-6, atol=1e-6)
    assert contract.row_statistics(call_of(AttentionSpec(), 5, 5, torch.float64)) is None
    assert through_triton == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_tiles_that_every_row_sees_whole_have_the_same_statistics_and_show_what_is_no_number(
    through_triton: list[Any],
) -> None:
    for spec, causal in ((AttentionSpec(cap=Softcap(2.0)), True), (AttentionSpec(), False)):
        call = call_of(spec, 80, 90, torch.float32, 3.0, causal=causal)
        found = contract.row_statistics(call)
        assert found is not None
        check_rows(call, call.spec.cap.formula(), found)
    q, k = torch.randn(1, 2, 80, 16), torch.randn(1, 2, 80, 16)
    k[0, 0, 3], q[0, 1, 70] = torch.nan, -1e30
    k[0, 1] = 1e30
    found = contract.row_statistics(make_call(AttentionSpec(), q, k, k))
    assert found is not None
    assert all(x[0, 0, 3:].isnan().all() and x[0, 0, :3].isfinite().all() for x in found)
    assert found.largest[0, 1, 70] == -torch.inf
    assert found.lse[0, 1, 70].isnan()


@pytest.mark.usefixtures("_poisoned")
def test_every_row_is_written(through_triton: list[Any]) -> None:
    found = contract.row_statistics(call_of(AttentionSpec(), 67, 67, torch.float32))
    assert found is not None
    assert all(x.isfinite().all() for x in found)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, which multiplies for the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", one_in(BROKEN, 4))
def test_nan_and_overflow_reach_every_statistic_and_nothing_is_certified(kind: str, through_triton: list[Any]) -> None:
    told = torch.tensor([h in BROKEN[kind] for h in range(4)])
    for spec in (AttentionSpec(), AttentionSpec(cap=Softcap(5.0))):
        call = broken_call(kind, spec)
        rows = contract.row_statistics(call)
        assert rows is not None
        assert not rows.lse.isneginf().any()  # of a row that sees a key, whatever that holds
        for fields in (stats_of_rows(call, KernelRows(rows.largest, rows.lse, rows.entropy)), exact_bracket(call, "x")):
            ends = (
                (fields.max_logit, fields.entropy) if isinstance(fields, LogitStats) else (fields.lower, fields.upper)
            )
            for end in ends if spec.cap.kind == "none" else ends[:1]:
                assert torch.equal(~end.isfinite(), told)
        top, low = logit_maxima(call)
        assert torch.equal(~(top.isfinite() & low.isfinite()), told)
        found = exact_bracket(call, "no logsumexp here")
        assert found.note == "computed in one pass over q and k: no logsumexp here"
        assert found.certified is not None
        assert torch.equal(found.certified, ~told)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_whose_logits_are_all_minus_infinity_is_no_row_that_sees_nothing(through_triton: list[Any]) -> None:
    q, k = torch.full((1, 1, 3, 16), 1e30), torch.full((1, 1, 3, 16), -1e30)
    rows = contract.row_statistics(make_call(AttentionSpec(), q, k, k))
    assert rows is not None
    assert rows.lse.isnan().all()
    assert rows.entropy.isnan().all()
    assert (rows.largest == -torch.inf).all()
    assert (rows.smallest == -torch.inf).all()
