"""What lies just inside and just outside of what slots and parameters accept, and where learned parameters start."""

from __future__ import annotations

import math

import pytest
import torch

import qkeel
from qkeel.errors import InvalidTypeError, QkeelError
from qkeel.spec import AttentionSpec, FloorLogTemperature, Kerple, LeakyReRope, ReRope, RMSNorm, Softcap


def test_kerple_starts_evenly_spread_a_rising_and_p_falling() -> None:
    params = AttentionSpec(position=Kerple()).init_params(n_heads=4, n_kv_heads=2, head_dim=8)
    torch.testing.assert_close(params["kerple_a"], torch.tensor([0.125, 0.375, 0.625, 0.875]))
    torch.testing.assert_close(params["kerple_p"], torch.tensor([1.75, 1.25, 0.75, 0.25]))


def test_a_temperature_may_grow_from_the_first_position_on() -> None:
    factor = FloorLogTemperature(floor=1, alpha=1.0).factor(torch.arange(3)[None], 4, {})
    expected = 0.5 * (1 + torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64).log())
    torch.testing.assert_close(factor.flatten(), expected)


@pytest.mark.parametrize("position", [ReRope(window=2), LeakyReRope(window=2, factor=2.0)])
def test_positions_that_rotate_pairs_refuse_an_odd_width(position: ReRope) -> None:
    q = torch.randn(1, 1, 3, 5)
    with pytest.raises(QkeelError, match=r"even|pair"):
        position.check(5)
    with pytest.raises(QkeelError, match=r"even|pair"):
        qkeel.attention(q, q, q, spec=AttentionSpec(position=position))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_parameters_are_floating_point_numbers_of_16_bits_or_more(dtype: torch.dtype) -> None:
    spec = AttentionSpec(norm=RMSNorm(gain="dim"))
    q = torch.randn(1, 2, 3, 8)
    params = spec.init_params(2, 2, 8)
    assert params
    qkeel.attention(q, q, q, spec=spec, params=params)
    name = next(iter(params))
    with pytest.raises(InvalidTypeError, match=r"floating-point numbers of 16 bits or more"):
        qkeel.attention(q, q, q, spec=spec, params={**params, name: params[name].to(dtype)})


def test_an_infinite_softcap_is_no_cap_to_any_kernel() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    capped, plain = AttentionSpec(cap=Softcap(math.inf)), AttentionSpec()
    assert capped.cap.limit is None
    expected = qkeel.attention(q, k, v, spec=plain)
    found, stats = qkeel.attention(q, k, v, spec=capped, stats=True)
    assert found.isfinite().all()
    assert stats.max_logit.isfinite().all()
    torch.testing.assert_close(found, expected)
