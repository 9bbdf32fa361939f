"""A scan gives the numbers of float64 linear algebra on the weights that make each head."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from audit.models import CONFIGS, projections, save
from qkeel.audit import Geometry, as_json, scan, table
from qkeel.audit.check import of_scan


def scanned(
    folder,
    tensors,
    flags=None,
    config=None,
):
    """A scan of a folder with these tensors, of 4 heads unless the config says otherwise."""
    save_file(dict(tensors), folder / "model.safetensors")
    config = {"num_attention_heads": 4} if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    return scan(folder, flags=flags)


def pair(at="attn.", q=None, k=None):
    """The weights of queries and keys, by default two identities of 32."""
    weights = {"q": torch.eye(32) if q is None else q}
    weights["k"] = weights["q"].clone() if k is None else k
    return {f"{at}{side}_proj.weight": weight for side, weight in weights.items()}


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def largest_singular(q, k):
    return torch.linalg.svdvals(q.double().mT @ k.double())[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_of_every_head_equal_float64_singular_values(name, tmp_path):
    model = save(name, tmp_path)
    found = scan(tmp_path)
    assert len(found.sites) == 2
    assert found.unknown == ()
    for layer, site in enumerate(found.sites):
        q, k = projections(name, model, layer)
        assert f".{layer}." in site.name
        singular = torch.linalg.svdvals(q.mT @ k)
        expected = {
            "query_frobenius": q.flatten(1).norm(dim=1),
            "query_spectral": torch.linalg.svdvals(q)[:, 0],
            "key_frobenius": k.flatten(1).norm(dim=1),
            "key_spectral": torch.linalg.svdvals(k)[:, 0],
            "interaction_frobenius": singular.norm(dim=1),
            "interaction_spectral": singular[:, 0],
        }
        for column, values in expected.items():
            assert_close(exact(getattr(site, column)), values, rtol=1e-9, atol=0)


def test_a_bound_is_the_gains_where_there_are_gains_and_the_layers_where_each_head_has_one(
    tmp_path,
):
    found = scanned(tmp_path, pair(), config={"num_attention_heads": 0, "n_head": 2})
    (site,) = found.sites
    bounds = {"gain_bound": (2.0, math.nan), "logit_bound": (3.0, 4.0)}
    both = dataclasses.replace(site, **bounds)
    assert both.bounds() == [2.0, 4.0]
    one = dataclasses.replace(both, logit_bound=(3.0, math.nan))
    for sites, largest in (((both,), 4.0), ((one, both), 4.0), ((one,), math.nan)):
        health = of_scan(dataclasses.replace(found, sites=sites))
        assert health.largest == pytest.approx(largest, nan_ok=True)
    assert health.rows == ((site.name, "-", "q, k norm", "0"),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_q_and_k_are_read_as_what_they_are(dtype, tmp_path):
    q, k = torch.randn(32, 32).to(dtype), torch.randn(32, 32)
    found = scanned(tmp_path, pair(q=q, k=k))
    expected = largest_singular(q.view(4, 8, 32), k.view(4, 8, 32))
    assert_close(
        exact(found.sites[0].interaction_spectral), expected, rtol=1e-5, atol=0
    )
    norms = {t.name: t.frobenius for t in found.tensors}
    assert norms["attn.q_proj.weight"] == pytest.approx(float(q.double().norm()), 1e-5)


def test_nan_and_infinity_are_counted_and_hide_no_other_head(tmp_path):
    weights = pair(q=torch.randn(32, 32))
    (clean,) = scanned(tmp_path, weights).sites
    weights["attn.q_proj.weight"][8:10, 3] = torch.tensor([torch.nan, torch.inf])
    found = scanned(tmp_path, weights)
    assert {t.name: t.non_finite for t in found.tensors if t.non_finite} == {
        "attn.q_proj.weight": 2
    }
    (site,) = found.sites
    assert site.outlier == (False, True, False, False)
    assert math.isnan(site.interaction_spectral[1])
    for head in (0, 2, 3):
        assert site.interaction_spectral[head] == pytest.approx(
            clean.interaction_spectral[head], rel=1e-12
        )
    assert "NaN" in table(found)


def test_a_head_that_stands_out_is_marked(tmp_path):
    save("gpt_neox", tmp_path)
    assert not any(any(site.outlier) for site in scan(tmp_path).sites)
    stored = load_file(tmp_path / "model.safetensors")
    queries = stored["gpt_neox.layers.1.attention.query_key_value.weight"][48:56]
    queries *= 30  # of head 2
    save_file(stored, tmp_path / "model.safetensors")
    found = scan(tmp_path)
    assert [site.outlier.index(True) for site in found.sites if any(site.outlier)] == [
        2
    ]
    assert "gpt_neox.layers.1.attention head 2" in table(found)
    # The row of a layer is that of its largest head.
    row = next(
        x for x in table(found).splitlines() if x.startswith("gpt_neox.layers.1")
    )
    assert row.split()[1:3] == ["2", "!"]


QUANTISED = torch.eye(32).to(torch.float8_e4m3fn)
FUSED = {"attn.query_key_value.weight": torch.ones(96, 32)}
# The tensors, the flags and the config of what cannot be read, and words of the reason.
UNKNOWN = {
    "no heads": (pair(), None, {}, "--n-heads"),
    "no order": (FUSED, Geometry(n_heads=4), {}, "--layout"),
    "other heads": (pair(), Geometry(n_heads=5), {}, "5 heads"),
    "other key heads": (pair(), Geometry(n_kv_heads=2), None, "k_proj 32"),
    "other head_dim": (pair(), Geometry(head_dim=4), None, "key heads of 4"),
    "other names": (
        pair() | {"layers.9.linear_attn.in_proj_qkvz.weight": torch.ones(4, 4)},
        None,
        None,
        "no known names for query and key among in_proj_qkvz",
    ),
    "no matrix": (pair(q=torch.ones(0, 32)), None, None, "expected a matrix"),
    "square": ({"attn.qkv.weight": torch.ones(32, 32)}, None, None, "square"),
    "no width": (
        FUSED,
        Geometry(n_kv_heads=2),
        {"model_type": "gpt_neox", "n_head": 4},
        "96 x 32",
    ),
    "codegen": (
        {"attn.qkv_proj.weight": torch.ones(96, 32)},
        None,
        {"model_type": "codegen"},
        "not read",
    ),
    "float8": (
        pair(q=QUANTISED) | {"attn.q_proj.weight_scale_inv": torch.ones(1)},
        None,
        None,
        "scales in attn.q_proj.weight_scale_inv",
    ),
    "float8 in blocks": (
        pair(q=QUANTISED) | {"attn.q_proj.weight_scale_inv": torch.ones(2, 2)},
        None,
        None,
        "quantised",
    ),
    "float8 with a scale beside": (
        pair(q=QUANTISED) | {"attn.q_proj.scale_weight": torch.ones(())},
        None,
        None,
        "scales in attn.q_proj.scale_weight",
    ),
    "int8": (pair(q=torch.ones(32, 32, dtype=torch.int8)), None, None, "stored as I8"),
    "GPTQ": (
        {"attn.q_proj.qweight": torch.ones(4, 4, dtype=torch.int32)},
        None,
        None,
        "quantised",
    ),
    **{
        f"an adapter: {leaf}": (
            pair() | {f"attn.q_proj.{leaf}": torch.ones(2, 32)},
            None,
            None,
            "adapter beside it",
        )
        for leaf in (
            "lora_A.another.weight",
            "lora_B",
            "hada_w1_a",
        )
    },
    "an adapter alone": (
        {"attn.q_proj.lora_A.weight": torch.ones(2, 32)},
        None,
        None,
        "without its base",
    ),
    "MLA without sizes": (
        {
            f"attn.{n}.weight": torch.ones(8, 8)
            for n in ("q_proj", "kv_a_proj_with_mqa")
        },
        None,
        None,
        "qk_nope_head_dim",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_read_is_listed_with_the_reason(name, tmp_path):
    tensors, flags, config, words = UNKNOWN[name]
    found = scanned(tmp_path, tensors, flags, config)
    (unknown,) = found.unknown
    assert words in unknown.reason
    assert f"unknown: {unknown.name}: " in table(found)
    assert len(found.sites) == (name == "other names")


NORM = {"input_layernorm.weight": torch.ones(32)}
# Norms before and after attention, and words of the note where there is no bound.
BOUNDS = {
    "a norm before": (pair() | NORM, {"model_type": "llama"}, ""),
    "no norm": (pair(), {}, "no norm found"),
    "a norm of another width": (
        pair(q=torch.ones(32, 48)) | NORM,
        {},
        "no norm found",
    ),
    "a norm after": (pair() | NORM, {"model_type": "swinv2"}, "follows attention"),
    "a config that says so": (pair() | NORM, {"norm_after": True}, "follows attention"),
    "a norm before or after": (
        pair() | {"norm1.weight": torch.ones(32)},
        {"model_type": "mine"},
        "norm1 precedes attention in some models and follows it in others",
    ),
    "GPT-2's norm": (pair("h.0.attn.") | {"h.0.ln_1.weight": torch.ones(32)}, {}, ""),
    **{
        f"norms without gains: {key}": (
            pair() | NORM,
            {key: True},
            "q and k are normed",
        )
        for key in ("use_qk_norm", "query_key_norm", "use_qk_layernorm")
    },
    **{
        f"cross attention as {name}": (
            pair(f"{name}.") | pair("self_attn.") | NORM,
            {},
            "another sequence",
        )
        for name in ("multihead_attn", "attn2")
    },
    **{
        f"{other} beside": (
            pair() | NORM | {f"attn.{other}": torch.ones(32, 32)},
            {},
            f"{other.removesuffix('.weight')} may take part",
        )
        for other in (
            "to_q_ip.weight",
            "pos_key_proj.weight",
            "q_bias",
            "k_lora.weight",
            "qk_norm.weight",
            "qnorm.weight",
            "add_q_proj.weight",
            "norm_added_q.weight",
            "qkv_y.weight",
        )
    },
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_given_where_a_norm_surely_precedes_attention(name, tmp_path):
    tensors, config, note = BOUNDS[name]
    config = {"num_attention_heads": 4, **config}
    sites = scanned(tmp_path, tensors, config=config).sites
    (site,) = [x for x in sites if x.name != "self_attn"]
    # ‖x‖ ≤ √32, so |q·k| ≤ 32 for identities, times 1/√8.
    bound = math.nan if note else 32 / 8**0.5
    assert site.logit_bound == pytest.approx([bound] * 4, nan_ok=True)
    assert note in "".join(site.notes)
    assert bool(site.assumed) == (not note and config.get("model_type") != "llama")
    assert all(math.isfinite(x.logit_bound[0]) for x in sites if x is not site)


@pytest.mark.parametrize(
    "streams", [("img_attn", "txt_attn"), ("context_block.attn", "x_block.attn")]
)
def test_two_streams_of_tokens_are_one_layer_without_a_bound(streams, tmp_path):
    """The queries of one meet the keys of the other, whose gains may be larger."""
    stored = {}
    for stream in streams:
        stored[f"h.0.{stream}.qkv.weight"] = torch.randn(96, 32)
        for side in "qk":
            stored[f"h.0.{stream}.ln_{side}.weight"] = torch.ones(8)
    (site,) = scanned(tmp_path, stored).sites
    assert site.name == f"h.0.{streams[0]}"
    assert not any(map(math.isfinite, site.bounds()))


def test_yarn_of_one_type_of_layers_counts(tmp_path):
    """YaRN by a factor of 8 multiplies cos and sin by 0.1 ln 8 + 1."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    ropes = {"sliding": {"rope_type": "default"}, "full": yarn}
    config = {"num_attention_heads": 4, "rope_parameters": ropes}
    (site,) = scanned(tmp_path, pair() | NORM, config=config).sites
    expected = 32 / 8**0.5 * (0.1 * math.log(8) + 1) ** 2
    assert site.logit_bound[0] == pytest.approx(expected)


def test_the_bias_of_a_bare_gain_is_read(tmp_path):
    """A LayerNorm over heads of 8 with gain 1 and bias of length 5: no side is longer than √8 + 5."""
    weights = pair()
    for side in "qk":
        weights[f"attn.{side}_norm"] = torch.ones(8)
        weights[f"attn.{side}_norm_bias"] = 5 * torch.eye(8)[0]
    (site,) = scanned(tmp_path, weights).sites
    assert site.gain_bound[0] == pytest.approx((8**0.5 + 5) ** 2 / 8**0.5)


def test_flags_say_what_config_does_not(tmp_path):
    fused = torch.randn(96, 32)
    by_head = fused.view(4, 3, 8, 32)  # q, k, v interleaved per head
    flags = Geometry(n_heads=4, layout="groups")
    weights = {"attn.query_key_value.weight": fused}
    (site,) = scanned(tmp_path, weights, flags, {}).sites
    assert_close(
        exact(site.interaction_spectral),
        largest_singular(by_head[:, 0], by_head[:, 1]),
        rtol=1e-9,
        atol=0,
    )
    # 8 heads of 64 over an input of 256: the only width that fits.
    wide = {"attn.qkv.weight": torch.randn(1536, 256)}
    assert scanned(tmp_path, wide, Geometry(n_heads=8), {}).sites[0].head_dim == 64
    # By width, where the number of heads differs from layer to layer.
    (site,) = scanned(tmp_path, pair(), Geometry(head_dim=4), {}).sites
    assert (site.n_heads, site.head_dim) == (8, 4)


def test_heads_may_differ_by_stage(tmp_path):
    stored = {}
    for i in range(3):
        stored |= pair(f"down.{i}.attn.", torch.eye(8 * 2**i))
    flags = Geometry(n_heads=1, stages=(("down.0", 2), ("down.1", 8)))
    sites = scanned(tmp_path, stored, flags, {}).sites
    heads = [(site.n_heads, site.head_dim) for site in sites]
    assert heads == [(2, 4), (8, 2), (1, 32)]


@pytest.mark.parametrize(
    ("stages", "config", "heads"),
    [
        (
            ("model.encoder.", "model.decoder."),
            {"encoder_attention_heads": 8, "decoder_attention_heads": 2},
            [8, 2],
        ),
        # In a diffusers UNet, attention_head_dim is the number of heads, from the outermost stage to the innermost.
        (
            ("down_blocks.0.", "mid_block.", "up_blocks.0."),
            {"_class_name": "UNet2DConditionModel", "attention_head_dim": [2, 4, 8]},
            [2, 8, 8],
        ),
        (
            ("vision.", "layers."),
            {"vision_config": {"num_heads": 8}, "text_config": {"n_head": 2}},
            [8, 2],
        ),
    ],
)
def test_a_config_has_head_counts_by_part(stages, config, heads, tmp_path):
    stored = {}
    for stage in stages:
        stored |= pair(f"{stage}self_attn.")
    found = {site.name: site for site in scanned(tmp_path, stored, None, config).sites}
    assert [found[f"{stage}self_attn"].n_heads for stage in stages] == heads


def test_the_layers_that_a_config_announces_are_missed(tmp_path):
    stored = pair("h.0.attn.") | pair("h.2.attn.")
    config = {"num_attention_heads": 2, "num_hidden_layers": 4}
    found = scanned(tmp_path, stored, None, config)
    assert [unknown.name for unknown in found.unknown] == ["h.1", "h.3"]


@torch.no_grad()
@pytest.mark.parametrize("q_latent", [12, None])
def test_the_bound_of_latent_attention_holds_with_and_without_a_latent_of_queries(
    q_latent, tmp_path
):
    from qkeel.nn import Decoder, DecoderConfig, LatentSizes
    from qkeel.sites import Tap

    latent = LatentSizes(
        q_latent=q_latent, kv_latent=10, rope_dim=4, nope_dim=6, value_dim=6
    )
    sizes = {"vocab_size": 50, "d_model": 32, "latent": latent, "latent_norm": True}
    model = Decoder(DecoderConfig(attention="mla", **sizes)).eval()
    for p in model.parameters():
        p.add_(0.3 * torch.randn_like(p))
    found = scanned(tmp_path, model.state_dict())
    assert found.unknown == ()
    sites = {site.name: site for site in found.sites}
    with Tap(model) as tap:
        model(torch.randint(50, (4, 20)))
        for name, stats in tap.read().items():
            bounds = torch.tensor(sites[name].logit_bound)
            assert (stats.max_abs_logit <= bounds).all()
            assert (stats.max_abs_logit > bounds / 100).any()
            at = f"{name}.{{}}.weight".format
            q, k = (
                model.get_parameter(at(n)).unflatten(0, (4, -1))
                for n in ("q_up", "k_up")
            )
            assert_close(
                exact(sites[name].interaction_spectral),
                largest_singular(q, k),
                rtol=1e-9,
                atol=0,
            )


def test_progress_ends_at_all_bytes_and_json_has_no_nan(tmp_path):
    (site,) = scanned(tmp_path, pair()).sites
    seen = []
    found = scan(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (found.n_bytes, found.n_bytes)
    assert seen == sorted(seen)
    back = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert back["sites"][0]["logit_bound"] == [None] * 4
    assert back["sites"][0]["query_spectral"] == list(site.query_spectral)
