"""The largest logits beside the output."""

from __future__ import annotations

import pytest
import torch

from qkeel import attention, preset
from qkeel.errors import UnknownNameError
from qkeel.spec import AttentionSpec, Rope, Sink, SlidingWindow, Softcap


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (AttentionSpec(position=Rope()), {}),
        (AttentionSpec(position=SlidingWindow(window=5)), {}),
        (AttentionSpec(position=Rope()), {"mask": torch.rand(17, 17) < 0.8}),
        (AttentionSpec(cap=Softcap(5.0)), {}),
        (AttentionSpec(normalizer=Sink(learned=False)), {}),
        (AttentionSpec(), {"impl": "chunked"}),
        (AttentionSpec(), {"impl": "sdpa"}),
        (AttentionSpec(), {"pos_q": torch.arange(17), "pos_k": torch.arange(17)}),
    ],
    ids=["plain", "window", "mask", "cap", "sink", "chunked", "sdpa", "positions"],
)
def test_the_largest_logits_are_exact_and_the_output_is_unchanged(
    native: str, spec: AttentionSpec, how: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    q, k, v = (
        torch.randn(2, 4, 17, 8),
        torch.randn(2, 2, 17, 8),
        torch.randn(2, 2, 17, 8),
    )
    out, largest = attention(q, k, v, spec=spec, stats="max", **how)
    assert torch.equal(out, attention(q, k, v, spec=spec, **how))
    exact = attention(q, k, v, spec=spec, stats=True, **how)[1]
    torch.testing.assert_close(largest.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)
    assert not largest.n_pairs.any()


def test_another_name_of_statistics_is_refused() -> None:
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(UnknownNameError, match="max"):
        attention(q, q, q, spec=AttentionSpec(), stats="bracket")  # type: ignore[call-overload]


def test_gradients_are_those_without_statistics() -> None:
    q, k, v = (
        torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    spec = preset("baseline")
    plain = torch.autograd.grad(attention(q, k, v, spec=spec).cos().sum(), (q, k, v))
    out, _ = attention(q, k, v, spec=spec, stats="max")
    assert all(map(torch.equal, torch.autograd.grad(out.cos().sum(), (q, k, v)), plain))
