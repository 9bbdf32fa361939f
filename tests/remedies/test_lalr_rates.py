"""The rates of LALR, worked by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from qkeel.remedies.lalr import HeadRates


def lalr_rates(q_norm: Tensor, k_norm: Tensor, q_start: Tensor, k_start: Tensor) -> tuple[Tensor, ...]:
    """The rates of W_Q [h] and W_K [g], each the other's partner in the one product of the logit."""
    h, g = sizes = len(q_norm), len(k_norm)
    alone, used = tuple((i,) for i in range(h)), tuple(i * g // h for i in range(h))
    users = tuple(tuple(i for i in range(h) if used[i] == j) for j in range(g))
    uses = [[((1,), (used,), alone)], [((0,), (tuple(range(h)),), users)]]
    rates = HeadRates(uses, sizes, torch.cat([q_start, k_start]))
    return rates(torch.cat([q_norm, k_norm])).split(sizes)


def test_lalr_divides_each_rate_by_the_growth_of_the_other_weight() -> None:
    q0, k0 = torch.rand(4, dtype=torch.float64) + 0.5, torch.rand(4, dtype=torch.float64) + 0.5
    query, key = lalr_rates(5 * q0, 3 * k0, q0, k0)
    torch.testing.assert_close(query, torch.full_like(q0, 1 / 3), rtol=1e-14, atol=0)
    torch.testing.assert_close(key, torch.full_like(k0, 1 / 5), rtol=1e-14, atol=0)


def test_lalr_rates_at_initialisation_are_one() -> None:
    q0, k0 = torch.rand(6, dtype=torch.float64) + 0.5, torch.rand(2, dtype=torch.float64) + 0.5
    query, key = lalr_rates(q0, k0, q0, k0)
    assert query.tolist() == [1.0] * 6
    assert key.tolist() == [1.0] * 2


def test_lalr_with_grouped_keys_takes_the_worst_query_head_of_the_group() -> None:
    one = torch.ones(4, dtype=torch.float64)
    q_norm = torch.tensor([1.0, 8.0, 2.0, 1.0], dtype=torch.float64)
    k_norm = torch.tensor([4.0, 1.0], dtype=torch.float64)
    query, key = lalr_rates(q_norm, k_norm, one, one[:2])
    assert query.tolist() == [0.25, 0.25, 1.0, 1.0]
    assert key.tolist() == [0.125, 0.5]


def test_lalr_leaves_the_rate_of_a_weight_whose_partner_is_zero() -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    assert [x.item() for x in lalr_rates(one, zero, one, zero)] == [1.0, 1.0]
    # What was zero at the start has nothing to be compared with, however large it is now.
    assert [x.item() for x in lalr_rates(one, 3 * one, one, zero)] == [1.0, 1.0]
