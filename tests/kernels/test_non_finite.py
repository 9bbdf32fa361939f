"""NaN and overflow reach every statistic of every kernel on a CPU, and nothing about such a head is certified."""

from __future__ import annotations

import pytest
import torch

from qkeel.kernels import compiled_attention
from qkeel.kernels.statistics import attend_with_logsumexp, bracket, logit_maxima, logit_stats, stats_of_rows
from qkeel.ops import KERNELS, PRICES, attention, run_with_rows
from qkeel.spec import AttentionCall, AttentionSpec, Softcap
from qkeel.spec.call import make_call

BROKEN: dict[str, tuple[int, ...]] = {"nan key": (2, 3), "nan query": (2,), "infinite query": (2,), "overflow": (2, 3)}


def broken_call(kind: str, spec: AttentionSpec) -> AttentionCall:
    """Of four heads those of BROKEN have a logit that is no finite number, the others a call as any other."""
    q, k, v = (torch.randn(2, heads, 17, 8) for heads in (4, 2, 2))
    if kind == "nan key":
        k[0, 1, 3, 0] = torch.nan
    elif kind == "overflow":
        q[1, 2:, 5], k[1, 1, 4] = 1e30, 1e30
    else:
        q[1, 2, 5, 0] = torch.nan if kind == "nan query" else torch.inf
    return make_call(spec, q, k, v)


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(cap=Softcap(5.0))], ids=["plain", "softcap"])
def test_what_is_not_finite_is_told_and_never_certified(
    kind: str, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = broken_call(kind, spec)
    told = torch.tensor([h in BROKEN[kind] for h in range(4)])
    for native in ("1", "0"):
        monkeypatch.setenv("QKEEL_NATIVE", native)
        found = [logit_stats(call)]
        rows = run_with_rows(call)
        assert (rows is None) is not compiled_attention.ready()
        if rows is not None:
            found.append(stats_of_rows(call, rows[1]))
        for stats in found:
            assert torch.equal(stats.non_finite.bool(), told)
        assert torch.equal(~logit_maxima(call)[0].isfinite(), told)
        for impl in KERNELS:
            if KERNELS[impl].supports(call) is not None:
                continue
            for stats in PRICES.values():
                ends = attention(call.q, call.k, call.v, spec=spec, stats=stats, impl=impl)[1]
                assert torch.equal(~ends.upper.isfinite(), told), (impl, stats)
                assert torch.equal(~ends.lower.isfinite(), told), (impl, stats)
                assert ends.certified is None or not (ends.certified & told).any(), (impl, stats)


def test_a_row_of_infinite_logsumexp_is_not_certified_by_the_rows_that_are_looked_at() -> None:
    call = broken_call("infinite query", AttentionSpec())
    pair = attend_with_logsumexp(call)
    assert pair is not None
    for price in ("max", "entropy"):
        found = bracket(call, pair[1].double(), price)  # type: ignore[arg-type]  # past the compiled kernel
        assert found.certified is not None
        assert not found.certified[2]
        assert not found.upper[2].isfinite()
