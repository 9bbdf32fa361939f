"""Sparse and compressed attention: the keys that queries reach, and the statistics over them, are those of float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from torch import nn

import qkeel

from .sparse_models import (
    DSA,
    B,
    M,
    Model,
    T,
    numbers,
)

MODELS = {
    "dsa, written out": (lambda: DSA(fused=False), {"a": "sparse"}),
    "dsa, fused": (lambda: DSA(fused=True), {"a": "sparse"}),
}


def built(name):
    torch.manual_seed(0)
    model = Model(MODELS[name][0]())
    with torch.no_grad():
        model.a.q_proj.weight.mul_(4)
    return model, torch.randn(B, T, M)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_float64_over_the_keys_that_are_reached(
    name,
):
    model, x = built(name)
    with qkeel.watch(model, stats="all+gates") as monitor:
        for _ in range(
            4
        ):  # the later passes are looked at in the modules that attend only
            model(x)
            sample = monitor.sample
            assert sample.layers == ("a",)
            for field, values in numbers(model.a.truth())._asdict().items():
                measured = sample.heads[field][0]
                assert_allclose(measured, values, rtol=2e-5, atol=2e-6, err_msg=field)


# --- Indexers


@pytest.mark.parametrize("name", ["dsa, written out", "dsa, fused"])
def test_an_indexers_scores_are_measured_with_its_layer(name):
    model, x = built(name)
    sites = qkeel.find_sites(model, x)
    assert [(one.name, one.layer_type, one.n_heads) for one in sites.indexers] == [
        ("a#index", "indexer", 1)
    ]
    with qkeel.watch(model) as monitor:
        for _ in range(4):
            model(x)
            index, heads = model.a.index_truth(), monitor.sample.heads
            reached = np.isfinite(index)
            e = np.exp(index - index.max(-1, keepdims=True))
            p = e / e.sum(-1, keepdims=True)
            entropy = (
                -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1).mean()
            )
            assert heads["index_max_logit"][0, 0] == pytest.approx(
                index.max(), rel=1e-5
            )
            assert heads["index_mean_logit"][0, 0] == pytest.approx(
                index[reached].mean(), rel=1e-4, abs=1e-6
            )
            assert heads["index_entropy"][0, 0] == pytest.approx(entropy, rel=1e-5)
            assert np.isnan(heads["index_max_logit"][0, 1:]).all()


def test_a_router_of_experts_is_no_indexer():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.router = nn.Linear(M, M), nn.Linear(M, 8)
            self.experts = nn.Parameter(torch.randn(8, M))

        def forward(self, x):
            x = F.scaled_dot_product_attention(self.q(x), x, x)
            best = (
                self.router(x).topk(2).indices,
                (x @ self.experts.mT).topk(2).indices,
            )
            return x + self.experts[best[0]].sum(-2) + self.experts[best[1]].sum(-2)

    assert not qkeel.find_sites(Routed(), torch.randn(B, T, M)).indexers
