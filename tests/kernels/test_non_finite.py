"""NaN and overflow reach every statistic of every kernel on a CPU."""

import pytest
import torch

from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.ops import KERNELS, attention
from qkeel.spec import AttentionSpec, Softcap
from qkeel.spec.call import make_call

BROKEN = {
    "nan key": (2, 3),
    "nan query": (2,),
    "infinite query": (2,),
    "overflow": (2, 3),
}


def broken_call(kind, spec):
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
@pytest.mark.parametrize(
    "spec", [AttentionSpec(), AttentionSpec(cap=Softcap(5.0))], ids=["plain", "softcap"]
)
def test_what_is_not_finite_is_told(kind, spec, monkeypatch):
    call = broken_call(kind, spec)
    told = torch.tensor([h in BROKEN[kind] for h in range(4)])
    for native in ("1", "0"):
        monkeypatch.setenv("QKEEL_NATIVE", native)
        assert torch.equal(logit_stats(call).non_finite.bool(), told)
        assert torch.equal(~max_stats(call).max_logit.isfinite(), told)
        for impl in KERNELS:
            if KERNELS[impl].supports(call) is None:
                _, largest = attention(
                    call.q, call.k, call.v, spec=spec, stats="max", impl=impl
                )
                assert torch.equal(~largest.max_logit.isfinite(), told), impl
