"""A NaN or infinity in the only key that a query sees reaches the output, as by the definition in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import qkeel


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("preset", ["baseline", "qwen3"])
@pytest.mark.parametrize("tokens", [(1, 1), (2, 2), (5, 5), (1, 5)])
def test_what_is_not_finite_in_the_only_key_is_not_finite_in_the_output(
    tokens: tuple[int, int], preset: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    (t, s), spec = tokens, qkeel.preset(preset)
    for width, value, groups, seed in itertools.product(
        (16, 12), (math.nan, math.inf, -math.inf), (1, 2), (0, 1)
    ):
        torch.manual_seed(seed)
        params = spec.init_params(n_heads=2, n_kv_heads=groups, head_dim=width)
        q, k, v = (
            torch.randn(1, 2, t, width),
            torch.randn(1, groups, s, width),
            torch.randn(1, groups, s, width),
        )
        k[0, 0, 0, 0] = value
        wide = {name: x.double() for name, x in params.items()}
        with torch.no_grad():
            out = qkeel.attention(q, k, v, spec=spec, params=params)
            want = qkeel.attention(
                q.double(),
                k.double(),
                v.double(),
                spec=spec,
                params=wide,
                impl="chunked",
            )
        assert torch.equal(out.isfinite(), want.isfinite()), (
            width,
            value,
            groups,
            seed,
        )


def test_with_a_gradient_one_query_of_one_key_is_nan_and_finite_ones_keep_their_gradients() -> (
    None
):
    for value in (math.nan, 0.5):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 1, 12, requires_grad=True) for _ in range(3))
        with torch.no_grad():
            k[0, 0, 0, 0] = value
        out = qkeel.attention(q, k, v, spec=qkeel.AttentionSpec())
        assert torch.equal(
            out.isnan()[0, :, 0, 0], torch.tensor([math.isnan(value), False])
        )
        out[:, 1].sum().backward()
        assert v.grad is not None
        assert torch.equal(v.grad[0, 1], torch.ones(1, 12))
