"""Calls of one shape are reduced together, and each site has the numbers that its calls have alone, in their order."""

import random

import pytest
import torch
from torch.testing import assert_close

from qkeel.capture.calls import SiteStatistics
from qkeel.functional.statistics import TENSORS, merge
from qkeel.kernels.logits import compiled
from qkeel.kernels.statistics import plain_rows, reduce_calls


def rows_of(t, groups):
    q, k = torch.randn(2, 4, t, 8), torch.randn(2, groups, t, 8)
    rows = plain_rows(q, k, 0.4, causal=True)
    assert rows is not None
    return rows


def alone(rows):
    (stats,) = reduce_calls([rows]).values()
    return stats


@pytest.mark.parametrize("seed", range(12))
def test_each_site_has_its_own_numbers_in_the_order_of_the_calls(seed):
    if not compiled.ready():
        pytest.skip("needs the compiled pass")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    forms = {site: draw.choice([2, 4]) for site in "abcdef"}
    passes, expected = [], {}
    for _ in range(draw.randint(1, 3)):
        t = draw.choice([1, 5, 9])
        # Layers that are left out, and layers that are called again.
        called = [x for x in forms if draw.random() < 0.8] + ["b"] * (seed % 2)
        passes.append(SiteStatistics())
        for site in called:
            rows = rows_of(t, forms[site])
            stats = alone(rows)
            expected[site] = merge(expected[site], stats) if site in expected else stats
            # Some are reduced one by one, as masks make them.
            passes[-1].add(site, stats if draw.random() < 0.1 else rows, None)
    together = SiteStatistics(passes)
    assert set(together) == set(expected)
    if len(passes) == 1:
        assert list(together) == list(expected)
    for site, stats in expected.items():
        for name in TENSORS:
            assert_close(
                getattr(together[site], name),
                getattr(stats, name),
                rtol=1e-5,
                atol=1e-6,
            )
