"""FlexAttention is asked for its auxiliary outputs by the names it has, and shown who sees whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import flex_maxima
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

from qkeel import preset, reference
from qkeel.errors import RefusedError
from qkeel.spec import AttentionSpec, SlidingWindow
from qkeel.spec.call import make_call


def on_a_gpu(*args: Any, return_aux: AuxRequest, **how: Any) -> tuple[torch.Tensor, AuxOutput]:
    """flex_attention on the CPU, which gives the logsumexp but not the maxima: those from a second, sharper call."""
    assert return_aux == AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(*args, return_aux=AuxRequest(lse=True), **how)
    _, sharp = flex_attention(*args, return_aux=AuxRequest(lse=True), **{**how, "scale": how["scale"] * 4096})
    assert aux.lse is not None
    assert sharp.lse is not None
    return out, AuxOutput(lse=aux.lse, max_scores=sharp.lse / 4096)


@pytest.mark.parametrize(
    "spec", [preset("qwen3"), AttentionSpec(position=SlidingWindow(window=5))], ids=["full", "window"]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_output_logsumexp_and_maxima_are_those_of_the_oracle(spec: AttentionSpec, causal: bool) -> None:
    for t, s in [(24, 24) if causal else (8, 24)]:
        q, k, v = torch.randn(1, 4, t, 16), torch.randn(1, 2, s, 16), torch.randn(1, 2, s, 16)
        call = make_call(spec, q, k, v, params=spec.init_params(4, 2, 16), causal=causal)
        out, lse, top = flex_maxima.attend(on_a_gpu, call)
        truth = reference.attend_call(call)
        seen = call.visible(slice(0, t), slice(0, s))
        z = truth.logits if seen is None else truth.logits.masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(out, truth.out.to(out.dtype), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, z.logsumexp(-1).to(lse.dtype), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(top, z.amax(-1).to(top.dtype), rtol=1e-3, atol=3e-3)


def test_a_cpu_is_refused_with_a_way_out() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RefusedError, match="CUDA device only; use qkeel"):
        flex_maxima.attend_with_maxima(make_call(AttentionSpec(), q, q, q))
