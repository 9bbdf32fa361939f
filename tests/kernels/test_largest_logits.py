"""The largest logits beside the output."""

import pytest
import torch
from torch.testing import assert_close

from qkeel import attention
from qkeel.kernels.statistics import logit_stats, stats_of_tops
from qkeel.spec import AttentionSpec, Rope, Sink, SlidingWindow, Softcap
from qkeel.spec.call import make_call

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


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": torch.rand(2, 17, generator=torch.Generator().manual_seed(0)) < 0.8}],
)
def test_the_spread_beside_them_is_that_of_the_whole_rows(options):
    q, k = torch.randn(2, 4, 17, 8), torch.randn(2, 2, 17, 8) + 3
    call = make_call(AttentionSpec(), q, k, k, **options)
    hidden = torch.ones(17, 17, dtype=torch.bool).triu(1)
    if options:
        hidden = hidden | ~options["mask"][:, None, None]
    largest = (
        (q @ k.repeat_interleave(2, 1).mT / 8**0.5)
        .masked_fill(hidden, -torch.inf)
        .amax(-1)
    )
    found, exact = stats_of_tops(call, largest), logit_stats(call)
    assert_close(found.max_logit, exact.max_logit)
    assert_close(found.logit_spread, exact.logit_spread, rtol=1e-5, atol=1e-5)
