"""A scan gives the numbers of float64 linear algebra on the weights that make each head."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from audit.models import CONFIGS, projections, save
from qkeel.audit import Geometry, Scan, as_json, table
from qkeel.audit.attention_weights import Unknown
from qkeel.audit.scan import scan


def _matrix(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_of_every_head_equal_float64_singular_values(
    name: str, tmp_path: Path
) -> None:
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
            torch.testing.assert_close(
                _matrix(getattr(site, column)), values, rtol=1e-9, atol=0
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_no_logit_of_the_running_model_exceeds_its_bound(
    name: str, tmp_path: Path
) -> None:
    model = save(name, tmp_path)
    found = scan(tmp_path)
    largest = _largest_logits(
        model, torch.randint(1, 32, (8, 24), generator=torch.Generator().manual_seed(0))
    )
    assert len(largest) == len(found.sites)
    for seen, site in zip(largest, found.sites):
        bound = _matrix(
            site.logit_bound
            if name not in ("qwen3", "gemma3_text", "olmo2")
            else site.gain_bound
        )
        assert (seen <= bound * (1 + 1e-5)).all(), (seen, bound)
        assert (seen > bound / 200).all()  # a bound that says something


def _largest_logits(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Per layer and head, the largest |logit| on its way into softmax."""
    softmax, seen = torch.nn.functional.softmax, []

    def spy(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if x.ndim == 4:
            seen.append(x.double().masked_fill(x < -1e20, 0).abs().amax((0, 2, 3)))
        return softmax(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", spy)
        patch.setattr(torch, "softmax", spy)
        model(tokens)
    return seen


def test_norm_gains_are_read_with_the_convention_of_the_model(tmp_path: Path) -> None:
    for name, offset in (("qwen3", 0.0), ("gemma3_text", 1.0)):
        model = save(name, tmp_path / name)
        gain = (
            model.state_dict()["model.layers.0.self_attn.q_norm.weight"].double()
            + offset
        )
        site = scan(tmp_path / name).sites[0]
        assert site.query_gain_max == pytest.approx(float(gain.abs().max()), rel=1e-12)
        assert site.key_gain_max is not None


def test_a_gain_bound_is_root_d_times_the_gains(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path)
    q, k = (
        model.state_dict()[f"model.layers.0.self_attn.{s}_norm.weight"]
        .double()
        .abs()
        .max()
        for s in "qk"
    )
    assert scan(tmp_path).sites[0].gain_bound == pytest.approx(
        [float(16**0.5 * q * k)] * 4, rel=1e-9
    )


def test_shards_and_one_file_give_the_same_scan(tmp_path: Path) -> None:
    save("llama", tmp_path / "one")
    save("llama", tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = scan(tmp_path / "one"), scan(tmp_path / "many")
    assert [s.name for s in one.sites] == [s.name for s in many.sites]
    for a, b in zip(one.sites, many.sites):
        assert a.interaction_spectral == pytest.approx(
            b.interaction_spectral, rel=1e-13
        )
        assert a.logit_bound == pytest.approx(b.logit_bound, rel=1e-13)
    others = {t.name: t for t in many.tensors}
    assert {t.name for t in one.tensors} == others.keys()
    for t in one.tensors:  # a float32 sum depends on where its numbers begin in memory
        assert dataclasses.replace(t, frobenius=0.0) == dataclasses.replace(
            others[t.name], frobenius=0.0
        )
        assert t.frobenius == pytest.approx(others[t.name].frobenius, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.bfloat16, 1e-5), (torch.float16, 1e-5), (torch.float64, 1e-9)],
)
def test_every_dtype_is_read_as_what_it_is(
    dtype: torch.dtype, error: float, tmp_path: Path
) -> None:
    save("llama", tmp_path)
    stored = {
        k: v.to(dtype) for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    q, k = (
        stored[f"model.layers.0.self_attn.{s}_proj.weight"].double().view(-1, 8, 32)
        for s in "qk"
    )
    expected = torch.linalg.svdvals(q.mT @ k.repeat_interleave(2, 0))[:, 0]
    found = scan(tmp_path)
    torch.testing.assert_close(
        _matrix(found.sites[0].interaction_spectral), expected, rtol=error, atol=0
    )
    for report in found.tensors:
        assert report.frobenius == pytest.approx(
            float(stored[report.name].double().norm()), rel=error
        )
        assert report.shape == tuple(stored[report.name].shape)


def test_nan_and_infinity_are_counted_and_hide_no_other_head(tmp_path: Path) -> None:
    save("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    clean = scan(tmp_path).sites[0]
    name = "model.layers.0.self_attn.q_proj.weight"
    stored[name][8:10, 3] = torch.tensor([torch.nan, torch.inf])  # head 1
    save_file(stored, tmp_path / "model.safetensors")
    found = scan(tmp_path)
    assert {t.name: t.non_finite for t in found.tensors if t.non_finite} == {name: 2}
    site = found.sites[0]
    assert site.outlier[1]
    assert site.interaction_spectral[1] != site.interaction_spectral[1]
    for head in (0, 2, 3):
        assert site.interaction_spectral[head] == pytest.approx(
            clean.interaction_spectral[head], rel=1e-12
        )
    assert "NaN" in table(found)


def test_a_head_that_stands_out_is_marked(tmp_path: Path) -> None:
    save("gpt_neox", tmp_path)
    assert not any(any(site.outlier) for site in scan(tmp_path).sites)
    stored = load_file(tmp_path / "model.safetensors")
    stored["gpt_neox.layers.1.attention.query_key_value.weight"][
        2 * 24 : 2 * 24 + 8
    ] *= 30  # queries of head 2
    save_file(stored, tmp_path / "model.safetensors")
    found = scan(tmp_path)
    assert [site.outlier for site in found.sites] == [
        (False,) * 4,
        (False, False, True, False),
    ]
    assert "gpt_neox.layers.1.attention head 2" in table(found)


def test_without_config_the_heads_come_from_flags_or_the_site_is_unknown(
    tmp_path: Path,
) -> None:
    save("llama", tmp_path)
    with_config = scan(tmp_path).sites
    (tmp_path / "config.json").unlink()
    found = scan(tmp_path)
    assert found.sites == ()
    assert len(found.unknown) == 2
    assert all("--n-heads" in unknown.reason for unknown in found.unknown)
    flagged = scan(tmp_path, flags=Geometry(n_heads=4, n_kv_heads=2)).sites
    assert [s.interaction_spectral for s in flagged] == [
        s.interaction_spectral for s in with_config
    ]
    assert "gains read as w" in flagged[0].assumed[0]


def test_a_fused_weight_whose_order_nobody_says_is_not_guessed(tmp_path: Path) -> None:
    save("gpt_neox", tmp_path)
    with_config = scan(tmp_path).sites
    (tmp_path / "config.json").unlink()
    assert "--layout" in scan(tmp_path, flags=Geometry(n_heads=4)).unknown[0].reason
    flagged = scan(tmp_path, flags=Geometry(n_heads=4, layout="groups")).sites
    assert [s.query_spectral for s in flagged] == [
        s.query_spectral for s in with_config
    ]


def test_head_counts_that_contradict_the_weights_are_told(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "num_key_value_heads": 4})
    )
    found = scan(tmp_path)
    assert found.sites == ()
    assert "2 key heads" in found.unknown[0].reason


def test_attention_under_other_names_beside_known_one_is_listed(tmp_path: Path) -> None:
    save("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.9.linear_attn.in_proj_qkvz.weight"] = torch.ones(4, 4)
    save_file(stored, tmp_path / "model.safetensors")
    unknown = scan(tmp_path).unknown
    assert unknown == (
        Unknown(
            "model.layers.9.linear_attn",
            "no known names for query and key among in_proj_qkvz",
        ),
    )


def test_quantised_weights_are_listed_not_measured(tmp_path: Path) -> None:
    save("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = torch.ones(1)
    save_file(stored, tmp_path / "model.safetensors")
    found = scan(tmp_path)
    assert [u.name for u in found.unknown] == ["model.layers.0.self_attn"]
    assert "quantised" in found.unknown[0].reason
    assert [s.name for s in found.sites] == ["model.layers.1.self_attn"]


def test_own_models_are_known(tmp_path: Path) -> None:
    from qkeel.lab.build_run import build_decoder
    from qkeel.lab.config import ModelConfig

    for block, attention in (("mha", "qwen3"), ("mla", "baseline")):
        config = ModelConfig(
            d_model=32, n_layers=2, n_heads=4, block=block, attention=attention
        )
        model = build_decoder(config, vocab_size=8)
        save_file(model.state_dict(), tmp_path / f"{block}.safetensors")
        found = scan(tmp_path / f"{block}.safetensors", flags=Geometry(n_heads=4))
        assert len(found.sites) == 2
        assert found.unknown == ()
        site, weights = (
            found.sites[1],
            {k: v.double() for k, v in model.state_dict().items()},
        )
        q, k = ("q_proj", "k_proj") if block == "mha" else ("q_up", "k_up")
        wq, wk = (
            weights[f"blocks.1.attention.{n}.weight"].unflatten(0, (4, -1))
            for n in (q, k)
        )
        expected = torch.linalg.svdvals(wq.mT @ wk)[:, 0]
        torch.testing.assert_close(
            _matrix(site.interaction_spectral), expected, rtol=1e-9, atol=0
        )
        assert (site.query_gain_max is not None) == (attention == "qwen3")


@torch.no_grad()
@pytest.mark.parametrize("q_latent", [12, None])
def test_the_bound_of_latent_attention_holds_with_and_without_a_latent_of_queries(
    q_latent: int | None, tmp_path: Path
) -> None:
    from qkeel.nn import Decoder, DecoderConfig, LatentSizes
    from qkeel.sites import Tap

    sizes = LatentSizes(
        q_latent=q_latent, kv_latent=10, rope_dim=4, nope_dim=6, value_dim=6
    )
    model = Decoder(
        DecoderConfig(
            vocab_size=50, d_model=32, attention="mla", latent=sizes, latent_norm=True
        )
    ).eval()
    for p in model.parameters():
        p.add_(0.3 * torch.randn_like(p))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    bounds = {
        s.name: s.logit_bound
        for s in scan(tmp_path / "model.safetensors", flags=Geometry(n_heads=4)).sites
    }
    with Tap(model) as tap:
        model(torch.randint(50, (4, 20)))
        for name, stats in tap.read().items():
            assert (stats.max_abs_logit <= torch.tensor(bounds[name])).all()


def test_progress_ends_at_all_bytes_and_json_has_no_nan(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    seen: list[tuple[int, int]] = []
    found: Scan = scan(
        tmp_path, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (found.n_bytes, found.n_bytes)
    assert seen == sorted(seen)
    back = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert back["sites"][0]["logit_bound"] == [None] * 4
    assert back["sites"][0]["gain_bound"] == pytest.approx(found.sites[0].gain_bound)


def test_encoder_and_decoder_may_have_different_head_counts(tmp_path: Path) -> None:
    config = {
        "model_type": "bart",
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [
        f"model.{half}.layers.0.self_attn.{x}_proj.weight"
        for half in ("encoder", "decoder")
        for x in "qk"
    ]
    save_file(
        {name: torch.randn(16, 16) for name in names}, tmp_path / "model.safetensors"
    )
    assert {
        s.name.split(".")[1]: (s.n_heads, s.head_dim) for s in scan(tmp_path).sites
    } == {
        "encoder": (4, 4),
        "decoder": (2, 8),
    }


def test_cross_attention_has_no_bound_from_the_norm_of_its_queries(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "whisper", "decoder_attention_heads": 2})
    )
    at = "model.decoder.layers.0"
    names = [
        f"{at}.{kind}.{x}_proj.weight"
        for kind in ("self_attn", "encoder_attn")
        for x in "qk"
    ]
    stored = {name: torch.randn(16, 16) for name in names} | {
        f"{at}.self_attn_layer_norm.weight": torch.ones(16)
    }
    save_file(stored, tmp_path / "model.safetensors")
    known = {
        s.name.split(".")[-1]: s.logit_bound[0] == s.logit_bound[0]
        for s in scan(tmp_path).sites
    }
    assert known == {"self_attn": True, "encoder_attn": False}


def test_many_layers_of_odd_heads_are_each_measured_as_themselves(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = {
        f"layers.{i}.attn.{x}_proj.weight": torch.randn(21, 9, generator=generator)
        * (i + 1)
        for i in range(24)
        for x in "qk"
    }
    save_file(stored, tmp_path / "x.safetensors")
    found = scan(tmp_path / "x.safetensors", flags=Geometry(n_heads=3))
    assert len(found.sites) == 24
    for site in found.sites:
        q, k = (
            stored[f"{site.name}.{x}_proj.weight"].double().view(3, 7, 9) for x in "qk"
        )
        expected = torch.linalg.svdvals(q.mT @ k)[:, 0]
        torch.testing.assert_close(
            _matrix(site.interaction_spectral), expected, rtol=1e-9, atol=0
        )
    for tensor in found.tensors:
        assert tensor.frobenius == pytest.approx(
            float(stored[tensor.name].double().norm()), rel=1e-6
        )


def _scanned(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Scan:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, **config})
    )
    return scan(folder)


@pytest.mark.parametrize("first", [False, True])
def test_torchs_own_layers_get_no_bound_from_a_norm_that_may_follow_attention(
    first: bool, tmp_path: Path
) -> None:
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, norm_first=first)
    found = _scanned(
        tmp_path, {n: p.detach().contiguous() for n, p in layer.state_dict().items()}
    )
    assert len(found.sites) == 2
    assert all(torch.isnan(_matrix(site.logit_bound)).all() for site in found.sites)
    (own,) = (site for site in found.sites if site.name == "self_attn")
    assert any(
        "norm1 precedes attention in some models and follows it in others" in note
        for note in own.notes
    )


@pytest.mark.parametrize(
    "name", ["multihead_attn", "attn2", "encoder_attn", "src_attn"]
)
def test_attention_to_another_sequence_is_known_by_its_name(
    name: str, tmp_path: Path
) -> None:
    weights = {
        f"layers.0.{n}.{one}_proj.weight": torch.eye(32)
        for one in "qk"
        for n in (name, "self_attn")
    }
    found = _scanned(
        tmp_path, {**weights, "layers.0.input_layernorm.weight": torch.ones(32)}
    )
    bounds = {site.name: _matrix(site.logit_bound) for site in found.sites}
    assert torch.isnan(bounds[f"layers.0.{name}"]).all()
    assert torch.isfinite(bounds["layers.0.self_attn"]).all()


def test_a_norm_of_another_width_than_the_projection_is_not_its_norm(
    tmp_path: Path,
) -> None:
    weights = {
        "attn.q_proj.weight": torch.eye(32),
        "attn.k_proj.weight": torch.ones(32, 48),
    }
    (site,) = _scanned(
        tmp_path, {**weights, "input_layernorm.weight": torch.ones(32)}
    ).sites
    assert torch.isnan(_matrix(site.logit_bound)).all()


def test_yarn_of_one_type_of_layers_counts(tmp_path: Path) -> None:
    """YaRN by a factor of 8 multiplies cos and sin by 0.1 ln 8 + 1."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    weights = {f"attn.{one}_proj.weight": torch.eye(32) for one in "qk"} | {
        "input_layernorm.weight": torch.ones(32)
    }
    plain, nested = (
        _scanned(tmp_path / f"{i}", weights, rope_parameters=rope)
        .sites[0]
        .logit_bound[0]
        for i, rope in enumerate(
            (
                {"rope_type": "default"},
                {"sliding": {"rope_type": "default"}, "full": yarn},
            )
        )
    )
    assert nested == pytest.approx(plain * (0.1 * math.log(8) + 1) ** 2)


@pytest.mark.parametrize(
    ("newer", "layout"), [(False, "q, k, v per key head"), (True, "[q | k | v]")]
)
def test_the_two_layouts_of_chatglm_are_told_apart(
    newer: bool, layout: str, tmp_path: Path
) -> None:
    config = {"multi_query_attention": False} if newer else {}
    weights = {"attention.query_key_value.weight": torch.randn(96, 32)}
    assert (
        _scanned(tmp_path, weights, model_type="chatglm", **config).sites[0].layout
        == layout
    )


@pytest.mark.parametrize("name", ["scale_weight", "weight_scale", "scale"])
def test_8_bit_weights_with_a_scale_beside_them_are_listed(
    name: str, tmp_path: Path
) -> None:
    weights = {
        f"attn.{one}_proj.weight": torch.eye(32).to(torch.float8_e4m3fn) for one in "qk"
    }
    (unknown,) = _scanned(
        tmp_path, {**weights, f"attn.q_proj.{name}": torch.ones(())}
    ).unknown
    assert f"quantised (scales in attn.q_proj.{name})" in unknown.reason


def test_the_bias_of_a_bare_gain_is_read(tmp_path: Path) -> None:
    """A LayerNorm over heads of 8 with gain 1 and bias of length 5: no side is longer than √8 + 5."""
    bias = 5 * torch.eye(8)[0]
    weights = {f"attn.{one}_proj.weight": torch.eye(32) for one in "qk"}
    weights |= {f"attn.{one}_norm": torch.ones(8) for one in "qk"} | {
        f"attn.{one}_norm_bias": bias.clone() for one in "qk"
    }
    (site,) = _scanned(tmp_path, weights).sites
    assert site.gain_bound[0] == pytest.approx((8**0.5 + 5) ** 2 / 8**0.5)


def test_a_fused_weight_of_a_width_that_heads_do_not_fill_is_not_cut(
    tmp_path: Path,
) -> None:
    weights = {"attention.query_key_value.weight": torch.randn(96, 32)}
    found = _scanned(tmp_path, weights, model_type="gpt_neox", num_key_value_heads=2)
    assert (
        "96 x 32, whose shape gives no width for 4 heads and 2 key heads"
        in found.unknown[0].reason
    )


def test_a_fused_weight_with_one_possible_width_is_read(tmp_path: Path) -> None:
    """8 heads of 64 over an input of 256."""
    weights = {"attn.qkv.weight": torch.randn(1536, 256)}
    (site,) = _scanned(tmp_path, weights, num_attention_heads=8).sites
    assert site.head_dim == 64


def test_a_gpt_without_a_config_keeps_its_bound_and_says_what_it_rests_on(
    tmp_path: Path,
) -> None:
    weights = {f"h.0.attn.{one}_proj.weight": torch.eye(32) for one in "qk"} | {
        "h.0.ln_1.weight": torch.ones(32)
    }
    (site,) = _scanned(tmp_path, weights).sites
    assert torch.isfinite(_matrix(site.logit_bound)).all()
    assert "norms taken to precede attention" in site.assumed[0]


@pytest.mark.parametrize(
    "kinds", [(torch.float32, torch.bfloat16), (torch.float16, torch.float64)]
)
def test_q_and_k_may_have_different_precision(
    kinds: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    weights = {
        f"attn.{one}_proj.weight": 2 * torch.eye(32, dtype=kind)
        for one, kind in zip("qk", kinds)
    }
    assert _scanned(tmp_path, weights).sites[0].interaction_spectral == pytest.approx(
        [4.0] * 4
    )


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_an_empty_weight_is_unknown(shape: tuple[int, int], tmp_path: Path) -> None:
    weights = {f"attn.{one}_proj.weight": torch.ones(shape) for one in "qk"}
    assert "expected a matrix" in _scanned(tmp_path, weights).unknown[0].reason


def test_normed_q_and_k_without_gains_have_no_bound(tmp_path: Path) -> None:
    """Llama 4 norms q and k without parameters, which leaves no trace but a flag."""
    weights = {f"attn.{one}_proj.weight": 0.01 * torch.eye(32) for one in "qk"}
    weights["input_layernorm.weight"] = torch.ones(32)
    (site,) = _scanned(tmp_path, weights, use_qk_norm=True).sites
    assert torch.isnan(_matrix(site.logit_bound)).all()
    assert "q and k are normed" in site.notes[0]
