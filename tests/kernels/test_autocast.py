"""Under autocast kernels and statistics are as exact as without it: logits are never rounded to half precision."""

from __future__ import annotations

import pytest
import torch

from qkeel import attention, reference
from qkeel.kernels.statistics import logit_stats
from qkeel.ops import KERNELS
from qkeel.spec import AttentionSpec, Softcap
from qkeel.spec.call import AttentionCall, make_call

CAPPED = AttentionSpec(cap=Softcap(50.0))


def call(spec: AttentionSpec, dtype: torch.dtype) -> AttentionCall:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        3 * torch.randn(1, h, 64, 64, generator=rng).bfloat16() for h in (4, 2, 2)
    )  # logits up to about 40
    return make_call(spec, q.to(dtype), k.to(dtype), v.to(dtype))


@pytest.mark.parametrize("spec", [AttentionSpec(), CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_errs_no_more_under_autocast(
    kernel: str, spec: AttentionSpec, dtype: torch.dtype
) -> None:
    asked, exact = (
        call(spec, dtype),
        reference.attend_call(call(spec, torch.float64)).out,
    )
    if KERNELS[kernel].supports(asked) is not None:
        pytest.skip("refuses")
    plain = (KERNELS[kernel](asked).double() - exact).abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        error = (KERNELS[kernel](asked).double() - exact).abs().max()
    rounding = (
        exact.abs().max() * torch.finfo(torch.bfloat16).eps
    )  # autocast may round what comes out
    assert error <= 2 * (plain + rounding)


@pytest.mark.parametrize("spec", [AttentionSpec(), CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_the_same_under_autocast(
    spec: AttentionSpec, dtype: torch.dtype
) -> None:
    asked = call(spec, dtype)
    plain = logit_stats(asked)
    with torch.autocast("cpu", torch.bfloat16):
        found = logit_stats(asked)
        _, told = attention(asked.q, asked.k, asked.v, spec=spec, stats=True)
    for stats in (found, told):
        assert torch.equal(stats.max_logit, plain.max_logit)
        assert torch.equal(stats.entropy, plain.entropy)
