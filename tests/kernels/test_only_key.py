"""A NaN or infinity in the only key that a query sees reaches the output, as by the definition in float64."""

import itertools
import math

import pytest
import torch

import qkeel


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("tokens", [(1, 1), (5, 5), (1, 5)])
def test_what_is_not_finite_in_the_only_key_is_not_finite_in_the_output(
    tokens, native, monkeypatch
):
    monkeypatch.setenv("QKEEL_NATIVE", native)
    t, s = tokens
    for preset, d, value, groups in itertools.product(
        ("baseline", "qwen3"), (16, 12), (math.nan, math.inf, -math.inf), (1, 2)
    ):
        spec = qkeel.preset(preset)
        params = spec.init_params(n_heads=2, n_kv_heads=groups, head_dim=d)
        shapes = (1, 2, t, d), (1, groups, s, d), (1, groups, s, d)
        qkv = [torch.randn(shape) for shape in shapes]
        qkv[1][0, 0, 0, 0] = value
        wide = {name: x.double() for name, x in params.items()}
        doubles = [x.double() for x in qkv]
        with torch.no_grad():
            out = qkeel.attention(*qkv, spec=spec, params=params)
            true = qkeel.attention(*doubles, spec=spec, params=wide, impl="chunked")
        assert torch.equal(out.isfinite(), true.isfinite()), (preset, d, value, groups)
