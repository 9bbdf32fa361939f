"""Sparse and compressed attention: the keys that queries reach, and the statistics over them, are those of float64."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from tests.drawing import randint
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


# --- The models of transformers


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield library


def v4(transformers):
    config = getattr(transformers, "DeepseekV4Config", None)
    if config is None:
        pytest.skip("this version has no DeepSeek-V4")
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 12,
        "o_lora_rank": 8,
    }
    types = [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]
    settings = config(
        vocab_size=50, num_hidden_layers=3, o_groups=2, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, sliding_window=6, index_n_heads=2, index_head_dim=8, index_topk=2, layer_types=types,
        compress_rates=dict(zip(types[1:], (4, 8))), num_hash_layers=0, **sizes,
    )  # fmt: skip
    settings._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(settings)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("sinks"):
                p.copy_(torch.tensor([-1.0, 0.0, 2.0, 5.0]))
            elif "scorer" in name or "indexer" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    return model


def test_deepseek_v4_of_transformers_is_seen_as_its_own_weights_say(
    transformers,
):
    model, ids = (
        v4(transformers),
        randint(0, 50, (2, 24), seed=2),
    )
    given = []
    scorer = model.get_submodule("model.layers.1.self_attn.compressor.indexer.scorer")
    with qkeel.watch(model, stats="all+chosen") as monitor:
        model(ids)
        hook = scorer.register_forward_hook(
            lambda module, args, out: given.append(out.detach().double())
        )
        weights = model(ids, output_attentions=True).attentions
        hook.remove()
        sample = monitor.sample
    assert [*sample.types.values()] == ["window", "compressed", "compressed"]
    for layer, w in enumerate(weights):
        w = w.detach().double()
        rest = (1 - w.sum(-1)).clamp_min(0)
        entropy = torch.special.entr(w).sum(-1) + torch.special.entr(rest)
        assert_allclose(
            sample.heads["entropy"][layer], entropy.mean((0, 2)), rtol=1e-4, atol=1e-5
        )
        free = (w > 0).sum(-1) > 1
        first = w.gather(-1, (w > 0).int().argmax(-1, keepdim=True))[..., 0]
        share = torch.stack([first[:, h][free[:, h]].mean() for h in range(4)])
        assert_allclose(sample.heads["sink_share"][layer], share, rtol=1e-4, atol=1e-5)
    (index,) = given
    reached = torch.arange(index.shape[-1]) < (torch.arange(24)[:, None] + 1) // 4
    expected = index.masked_fill(~reached, -torch.inf).amax().item()
    assert sample.heads["index_max_logit"][1, 0] == pytest.approx(expected, rel=1e-5)
    assert np.isnan(sample.heads["index_max_logit"][[0, 2]]).all()
