"""A site knows which rows of which weight make head h: zeroing them silences that head's logits and no other's."""

import pytest
import torch
from tests.drawing import randn
from torch import nn

import qkeel
from qkeel import find_sites
from qkeel.nn import MLA, Attention
from qkeel.nn.mla import LatentSizes
from qkeel.sites import Tap

SIZES = LatentSizes(q_latent=6, kv_latent=5, rope_dim=4, nope_dim=3, value_dim=2)
KINDS = {
    "mha": lambda: Attention(16, 4, bias=True),
    "gqa": lambda: Attention(16, 4, 2),
    "mqa": lambda: Attention(16, 4, 1),
    "mla": lambda: MLA(16, 4, sizes=SIZES),
    "mla normed": lambda: MLA(16, 4, sizes=SIZES, latent_norm=True),
}


def maxima(model):
    """Largest |logit| per head."""
    with Tap(model) as tap:
        model(randn(2, 5, 16, seed=1))
        (stats,) = tap.read().values()
    return stats.max_abs_logit


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_zeroing_a_heads_query_rows_silences_that_head_alone(kind):
    model = KINDS[kind]()
    before = maxima(model)
    (site,) = find_sites(model)
    for h in range(4):
        saved = {n: p.clone() for n, p in model.named_parameters()}
        for term in site.terms:
            piece = term.query[-1]
            assert piece.n == 4
            piece.heads(model.get_parameter(piece.parameter))[h] = 0
            if piece.bias is not None:
                model.get_parameter(piece.bias).view(piece.n, -1)[h] = 0
        after = maxima(model)
        assert after[h] == 0
        others = torch.arange(4) != h
        assert torch.equal(after[others], before[others])
        for n, p in model.named_parameters():
            p.copy_(saved[n])


def test_sites_found_on_meta_are_those_of_the_model_with_values():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    with torch.device("meta"):
        empty = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    x, stream = torch.randn(2, 5, 8), torch.get_rng_state()
    found, known = qkeel.find_sites(empty, x), qkeel.find_sites(block, x)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.is_meta for p in empty.parameters())
    for site, other in zip(found, known, strict=True):
        assert site.verified
        assert site.module is empty.get_submodule(site.name)
        for part, its in zip(
            (*site.query, *site.key), (*other.query, *other.key), strict=True
        ):
            assert part.parameter == its.parameter
            assert torch.equal(part.index, its.index)
    with qkeel.watch(block, sites=found) as monitor:  # bound again by their names
        block(x)
    assert [site.module for site in monitor.sites] == [site.module for site in known]
