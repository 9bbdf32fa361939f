"""nn.MLA is the attention of DeepSeek-V3 in transformers: same weights, same output, with a cache and without."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from qkeel.nn import MLA, LatentSizes
from qkeel.spec import AttentionSpec, InverseSqrt, Rope, YaRN

pytest.importorskip("transformers")

from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

D, H, T = 32, 4, 11
KINDS = {
    "V3": (
        LatentSizes(q_latent=12, kv_latent=10, rope_dim=8, nope_dim=6, value_dim=5),
        True,
    ),
    "V3, rotated by halves": (
        LatentSizes(q_latent=12, kv_latent=10, rope_dim=8, nope_dim=6, value_dim=5),
        False,
    ),
    "V2-Lite, no query latent": (
        LatentSizes(q_latent=None, kv_latent=10, rope_dim=8, nope_dim=6, value_dim=9),
        True,
    ),
}


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10_000.0}


def config(
    sizes: LatentSizes, interleaved: bool, rope: dict[str, object] | None = None
) -> DeepseekV3Config:
    made = DeepseekV3Config(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=sizes.q_latent,
        kv_lora_rank=sizes.kv_latent,
        qk_rope_head_dim=sizes.rope_dim,
        qk_nope_head_dim=sizes.nope_dim,
        v_head_dim=sizes.value_dim,
        rope_interleave=interleaved,
        max_position_embeddings=64,
        **({"rope_parameters": rope} if rope else {}),
    )
    made._attn_implementation = "eager"
    return made


def copied(stock: nn.Module, ours: MLA) -> None:
    """Theirs is [nope, rope] within a head of q, [nope, value] within kv_b, [latent, rope] in kv_a."""
    theirs, s = dict(stock.named_parameters()), ours.sizes
    q = theirs["q_proj.weight" if s.q_latent is None else "q_b_proj.weight"].view(
        H, s.nope_dim + s.rope_dim, -1
    )
    kv = theirs["kv_b_proj.weight"].view(H, s.nope_dim + s.value_dim, -1)
    state = {
        "q_up.weight": q[:, : s.nope_dim].flatten(0, 1),
        "q_rope.weight": q[:, s.nope_dim :].flatten(0, 1),
        "kv_down.weight": theirs["kv_a_proj_with_mqa.weight"][: s.kv_latent],
        "k_rope.weight": theirs["kv_a_proj_with_mqa.weight"][s.kv_latent :],
        "k_up.weight": kv[:, : s.nope_dim].flatten(0, 1),
        "v_up.weight": kv[:, s.nope_dim :].flatten(0, 1),
        "o_proj.weight": theirs["o_proj.weight"],
        "kv_latent_norm.weight": theirs["kv_a_layernorm.weight"],
    }
    if s.q_latent is not None:
        state["q_down.weight"] = theirs["q_a_proj.weight"]
        state["q_latent_norm.weight"] = theirs["q_a_layernorm.weight"]
    ours.load_state_dict(state)


def pair(kind: str) -> tuple[DeepseekV3Attention, MLA, DeepseekV3RotaryEmbedding]:
    sizes, interleaved = KINDS[kind]
    made = config(sizes, interleaved)
    stock = DeepseekV3Attention(made, 0).eval()
    for name, p in stock.named_parameters():
        p.data.normal_(1.0 if "layernorm" in name else 0.0, 0.3)
    spec = AttentionSpec(
        position=Rope(pairing="interleaved" if interleaved else "half")
    )
    ours = MLA(D, H, sizes=sizes, spec=spec, latent_norm=True).eval()
    copied(stock, ours)
    return stock, ours, DeepseekV3RotaryEmbedding(made)


def mask(rows: slice) -> Tensor:
    return torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[
        None, None, rows, : rows.stop
    ]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_same_weights_give_the_same_output(kind: str) -> None:
    stock, ours, rope = pair(kind)
    x = torch.randn(2, T, D)
    theirs = stock(x, rope(x, torch.arange(T)[None]), mask(slice(0, T)))[0]
    assert theirs.abs().max() > 0.1
    assert (ours(x) - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_same_weights_give_the_same_output_step_by_step_with_caches(kind: str) -> None:
    stock, ours, rope = pair(kind)
    x, mine, theirs = torch.randn(2, T, D), ours.new_cache(), DynamicCache()
    for rows in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, T)):
        table = rope(x, torch.arange(rows.start, rows.stop)[None])
        expected = stock(x[:, rows], table, mask(rows), past_key_values=theirs)[0]
        assert (
            ours(x[:, rows], cache=mine) - expected
        ).abs().max() <= 1e-6 * expected.abs().max()
    # Both hold the latent and the rotated key, theirs with the pairs taken apart.
    held, _ = mine.append(torch.empty(2, 1, 0, 10), torch.empty(2, 1, 0, 8))
    layer, (latent, rotated) = theirs.layers[0], held.split([10, 8], dim=-1)
    assert torch.allclose(layer.keys, latent, atol=1e-6)
    if KINDS[kind][1]:
        rotated = torch.cat([rotated[..., ::2], rotated[..., 1::2]], dim=-1)
    assert torch.allclose(layer.values, rotated, atol=1e-5)


@torch.no_grad()
def test_yarn_as_deepseek_v3_uses_it_is_a_stretch_and_a_scale() -> None:
    sizes, _ = KINDS["V3"]
    made = config(sizes, True, YARN)
    stock = DeepseekV3Attention(made, 0).eval()
    for name, p in stock.named_parameters():
        p.normal_(1.0 if "layernorm" in name else 0.0, 0.3)
    mscale = 0.1 * math.log(8.0) + 1  # on the scale, squared; cos and sin stay
    stretch = YaRN(factor=8.0, train_length=8, attention_factor=1.0)
    spec = AttentionSpec(
        position=Rope(pairing="interleaved", stretch=stretch),
        scale=InverseSqrt(multiplier=mscale**2),
    )
    ours = MLA(D, H, sizes=sizes, spec=spec, latent_norm=True).eval()
    copied(stock, ours)
    x, rope = torch.randn(2, T, D), DeepseekV3RotaryEmbedding(made)
    theirs = stock(x, rope(x, torch.arange(T)[None]), mask(slice(0, T)))[0]
    plain = MLA(
        D,
        H,
        sizes=sizes,
        spec=AttentionSpec(position=Rope(pairing="interleaved")),
        latent_norm=True,
    )
    copied(stock, plain)
    assert (plain(x) - theirs).abs().max() > 1e-2
    assert (ours(x) - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    cache = ours.new_cache()
    pieces = [
        ours(x[:, i : i + n], cache=cache) for i, n in ((0, 6), (6, 1), (7, 1), (8, 3))
    ]
    assert (torch.cat(pieces, 1) - theirs).abs().max() <= 1e-6 * theirs.abs().max()
