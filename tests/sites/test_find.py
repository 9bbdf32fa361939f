"""Sites of a model without values are those of the model that has them."""

import torch
from torch import nn

import qkeel


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
