"""Under autocast kernels and statistics are as exact as without it: logits are never rounded to half precision."""

import pytest
import torch

from qkeel import attention, reference
from qkeel.kernels.statistics import logit_stats
from qkeel.ops import KERNELS
from qkeel.spec import AttentionSpec, Softcap
from qkeel.spec.call import make_call


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(cap=Softcap(50.0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_statistics_are_as_exact_under_autocast(spec, dtype):
    # Logits up to about 40, of numbers that bfloat16 holds.
    q, k, v = (3 * torch.randn(1, h, 64, 64).bfloat16() for h in (4, 2, 2))
    wide = make_call(spec, q.double(), k.double(), v.double())
    call = make_call(spec, q.to(dtype), k.to(dtype), v.to(dtype))
    exact, stats = reference.attend_call(wide).out, logit_stats(call)
    # Autocast may round what comes out.
    rounding = exact.abs().max() * torch.finfo(torch.bfloat16).eps
    for name, kernel in KERNELS.items():
        if kernel.supports(call) is None:
            plain = (kernel(call).double() - exact).abs().max()
            with torch.autocast("cpu", torch.bfloat16):
                error = (kernel(call).double() - exact).abs().max()
            assert error <= 2 * (plain + rounding), name
    with torch.autocast("cpu", torch.bfloat16):
        again = attention(call.q, call.k, call.v, spec=spec, stats=True)[1]
    assert torch.equal(again.max_logit, stats.max_logit)
    assert torch.equal(again.entropy, stats.entropy)
