"""The largest logits beside the output."""

import pytest
import torch
from torch.testing import assert_close

from qkeel import attention
from qkeel.errors import UnknownNameError
from qkeel.spec import AttentionSpec, Rope, Sink, SlidingWindow, Softcap

POSITIONS = {"pos_q": torch.arange(17), "pos_k": torch.arange(17)}
CASES = [
    (AttentionSpec(position=Rope()), {}),
    (AttentionSpec(position=SlidingWindow(window=5)), {}),
    (AttentionSpec(position=Rope()), {"mask": torch.rand(17, 17) < 0.8}),
    (AttentionSpec(cap=Softcap(5.0)), {}),
    (AttentionSpec(), {"mask": torch.zeros(17, 17) > 0}),  # nothing to see
    (AttentionSpec(normalizer=Sink(learned=False)), {}),
    (AttentionSpec(), {"impl": "chunked"}),
    (AttentionSpec(), {"impl": "sdpa"}),
    (AttentionSpec(), POSITIONS),
]


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize(("spec", "options"), CASES)
def test_they_are_exact_and_output_and_gradients_unchanged(
    native,
    spec,
    options,
    monkeypatch,
):
    monkeypatch.setenv("QKEEL_NATIVE", native)
    qkv = [torch.randn(2, h, 17, 8, requires_grad=True) for h in (4, 2, 2)]
    plain = attention(*qkv, spec=spec, **options)
    out, largest = attention(*qkv, spec=spec, stats="max", **options)
    assert torch.equal(out, plain)
    grads = (torch.autograd.grad(x.cos().sum(), qkv) for x in (out, plain))
    assert all(map(torch.equal, *grads))
    exact = attention(*qkv, spec=spec, stats=True, **options)[1]
    assert_close(largest.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)
    assert not largest.n_pairs.any()


def test_another_name_of_statistics_is_refused():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(UnknownNameError):
        attention(q, q, q, spec=AttentionSpec(), stats="bracket")
