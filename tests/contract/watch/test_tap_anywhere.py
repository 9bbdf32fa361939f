"""The sites of models of transformers: their names, heads, rows and entropies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from tests.contract.watch.families import (  # noqa: E402
    SIZES,
    bert,
    gemma2,
    gpt2,
    ids,
    llama,
    t5,
)

from qkeel import find_sites  # noqa: E402
from qkeel.sites import Tap  # noqa: E402

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "llama": (llama, 2),
    "gpt2": (functools.partial(gpt2, attn_implementation="eager"), 2),
    "gemma2": (gemma2, 2),
    "bert": (bert, 2),
    "t5": (t5, 6),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_tap_and_the_probe_name_the_same_sites(name: str) -> None:
    model = MODELS[name][0]()
    tokens = ids(0)
    sites = find_sites(model, {"input_ids": tokens, "labels": tokens})
    with Tap(model) as tap:
        model(input_ids=tokens, labels=tokens)
        stats = tap.read()
    assert [s.name for s in sites] == list(stats)
    for site in sites:
        assert len(stats[site.name].max_logit) == site.n_heads
        assert len(stats[site.name].key_norm) == site.n_kv_heads
        assert site.terms, site.why


def test_entropy_is_that_of_the_weights_before_dropout() -> None:
    model = gpt2(attn_implementation="eager").train()
    for block in model.transformer.h:  # type: ignore[union-attr]
        nn.init.zeros_(block.attn.c_attn.weight)  # type: ignore[union-attr,arg-type]
    with Tap(model) as tap:
        model(input_ids=ids(0))
        stats = tap.read()
    uniform = torch.arange(1, 9).float().log().mean()
    for s in stats.values():
        torch.testing.assert_close(s.entropy, uniform.expand(4))


def test_a_latent_key_is_told_apart_from_the_rotated_one() -> None:
    config = transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        kv_lora_rank=12,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=2,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    site = find_sites(model, {"input_ids": ids(0)})[0]
    nope, rope = site.terms
    (up,), (down,) = nope.key, rope.key
    assert up.parameter.endswith("kv_b_proj.weight")
    assert torch.equal(up.index, 16 * torch.arange(4)[:, None] + torch.arange(8))
    assert down.parameter.endswith("kv_a_proj_with_mqa.weight")
    assert down.index.tolist() == [[12, 13, 14, 15]]
    assert torch.equal(
        nope.query[0].index, 12 * torch.arange(4)[:, None] + torch.arange(8)
    )
    assert torch.equal(
        rope.query[0].index, 12 * torch.arange(4)[:, None] + torch.arange(8, 12)
    )


def test_a_norm_over_all_heads_together_does_not_mix_them() -> None:
    model = transformers.Olmo2ForCausalLM(
        transformers.Olmo2Config(**SIZES, num_key_value_heads=2)
    )
    site = find_sites(model, {"input_ids": ids(0)})[0]
    assert site.normed
    assert torch.equal(site.query[0].index, torch.arange(32).view(4, 8))
    assert torch.equal(site.key[0].index, torch.arange(16).view(2, 8))
