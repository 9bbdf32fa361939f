"""A logit that is a sum of products is known by all of them, or the site says which part is not known."""

import pytest
import torch
from tests.attention import from_heads, to_heads
from torch import nn

from qkeel import find_sites

from .oracle import check, tapped
from .sums import SUMS, H, Sum, T, batch, capped_part, gated, made, memory_keys


@pytest.mark.parametrize("name", SUMS)
def test_every_product_is_a_term_and_statistics_are_those_of_the_sum(name):
    model = made(name)
    (site,) = find_sites(model, batch())
    assert site.why == ""
    assert site.n_heads == H

    def short(parameter):
        return parameter.removesuffix(".weight")

    terms = [
        ([short(s.parameter) for s in t.query], [short(s.parameter) for s in t.key])
        for t in site.terms
    ]
    assert terms == SUMS[name][2]
    stats = tapped(model, batch(), [site])
    check(stats, model.z)
    # No one pair of q and k makes the logit.
    assert stats.n_products.tolist() == [0] * H


@pytest.mark.parametrize("scores", [gated, memory_keys])
def test_a_part_that_other_weights_make_is_not_confirmed_and_statistics_are_right(
    scores,
):
    torch.manual_seed(0)
    model = Sum(scores, "q1", "k1")
    (site,) = find_sites(model, batch())
    assert not site.verified
    assert "part of them comes from other weights" in site.unverified
    stats = tapped(model, batch(), [site])
    check(stats, model.z)


def test_a_sum_of_which_a_part_is_capped_is_missed():
    model = nn.Sequential(Sum(capped_part, "q1", "k1", "q2", "k2"), made("two"))
    sites = find_sites(model, batch())
    assert [site.name for site in sites] == ["1"]
    assert [missed.module for missed in sites.missed] == ["0"]


def test_a_table_that_is_read_outside_the_module_is_a_term():
    """SpeechT5's encoder makes the keys of distances once for all layers."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, distances):
            q, k = (to_heads(p(x), H, 8).flatten(0, 1) for p in (self.q, self.k))
            z = q @ k.mT + (q.transpose(0, 1) @ distances.mT).transpose(0, 1)
            return from_heads((z.softmax(-1) @ k).unflatten(0, (-1, H)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.first, self.second = nn.Embedding(T, 8), Layer(), Layer()

        def forward(self, x):
            distances = self.table((torch.arange(T)[:, None] - torch.arange(T)).abs())
            return self.second(self.first(x, distances), distances)

    for site in find_sites(Model(), batch()):
        assert [t.key[0].parameter for t in site.terms] == [
            f"{site.name}.k.weight",
            "table.weight",
        ]
        assert (site.n_heads, site.head_dim, str(site.layout)) == (H, 8, "(b h) t s")
