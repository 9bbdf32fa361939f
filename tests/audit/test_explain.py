"""explain says what attention really does, found by experiment."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import nn

import qkeel
from audit.explained import MODELS, RECIPES, ByHand, batch_for
from qkeel.audit import Explanation
from qkeel.audit.recipes import compress
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError

# Per model and attention: norm of q (kind, over, eps, gain, bias, order), rotation (dims, pairing, base), scale, cap,
# heads of keys. From the modeling files of transformers 5.23.
NONE = ("none", "", None, "none", False, "")
FULL, QUARTER, HALF = (8, "half", 1e4), (2, "one pair", None), (4, "half", 1e4)
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "llama": [(NONE, FULL, 8**-0.5, None, 2)],
    "qwen3": [
        (
            ("RMS", "head", 1e-6, "per dim", False, "before RoPE"),
            (16, "half", 1e4),
            0.25,
            None,
            2,
        )
    ],
    "olmo2": [
        (
            ("RMS", "layer", 1e-5, "per head and dim", False, "before RoPE"),
            FULL,
            8**-0.5,
            None,
            2,
        )
    ],
    "gemma2": [(NONE, (16, "half", 1e4), 0.125, 50.0, 2)],
    "gemma3": [
        (
            ("RMS", "head", 1e-6, "per dim, 1 + w", False, "before RoPE"),
            (16, "half", base),
            1 / 16,
            None,
            2,
        )
        for base in (1e4, 1e6)
    ],
    "gpt2": [(NONE, None, 8**-0.5, None, 4)],
    "gpt_neox": [(NONE, QUARTER, 8**-0.5, None, 4)],
    "cohere": [
        (
            ("layer", "head", 1e-5, "per head and dim", False, "before RoPE"),
            (8, "interleaved", 5e5),
            8**-0.5,
            None,
            2,
        )
    ],
    "stablelm": [
        (
            ("layer", "head", 1e-5, "per head and dim", False, "before RoPE"),
            HALF,
            8**-0.5,
            None,
            2,
        )
    ],
    "chameleon": [
        (
            ("layer", "head", 1e-5, "per head and dim", True, "before RoPE"),
            FULL,
            8**-0.5,
            None,
            2,
        )
    ],
    "deepseek_v3": [(NONE, HALF, 12**-0.5, None, 4)],
    "gpt_oss": [(NONE, (16, "half", None), 0.25, None, 2)],
    "opt": [(NONE, None, 1.0, None, 4)],
    "t5": [(NONE, None, 1.0, None, 4)] * 3,
    "bert": [(NONE, None, 8**-0.5, None, 4)],
    "vit": [(NONE, None, 8**-0.5, None, 4)],
    "swinv2": [(("L2", "head", None, "none", False, ""), None, 10.0, None, 4)],
}


def explain(name: str) -> Explanation:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    return qkeel.explain(MODELS[name](), batch_for(name))


def by_hand(name: str) -> Explanation:
    torch.manual_seed(0)
    return qkeel.explain(nn.Sequential(ByHand(RECIPES[name])), torch.randn(2, 12, 32))


@pytest.mark.parametrize("name", MODELS)
def test_the_recipe_of_a_published_architecture_is_found(name: str) -> None:
    found = explain(name)
    assert len(found.sites) == len(EXPECTED[name])
    for site, (norm, rotation, scale, cap, groups) in zip(found.sites, EXPECTED[name]):
        for side in (site.query, site.key):
            assert (
                side.kind,
                side.over,
                side.eps,
                side.gain,
                side.bias,
                side.order,
            ) == norm
        turned = site.rotation and (
            site.rotation.dims,
            site.rotation.pairing,
            site.rotation.base,
        )
        assert turned == rotation
        assert site.scale == pytest.approx([scale] * site.n_heads, rel=1e-3)
        assert (site.n_heads, site.n_kv_heads, site.softcap) == (4, groups, cap)
        assert site.idle == site.unknown == ()
    assert found.differences == ()


def test_what_only_some_architectures_have_is_found() -> None:
    sites = {
        name: explain(name).sites
        for name in ("gemma3", "gpt_oss", "opt", "deepseek_v3", "swinv2", "t5")
    }
    assert [site.window for site in sites["gemma3"]] == [4, None]
    assert sites["gpt_oss"][0].sinks == "1 sink logit per head in the softmax (sinks)"
    assert sites["gpt_oss"][0].query.factor == pytest.approx(
        1.34657, rel=1e-4
    )  # YaRN: 0.1 ln 32 + 1
    assert sites["opt"][0].query.factor == pytest.approx(
        8**-0.5, rel=1e-4
    )  # the scale is folded into q
    assert sites["opt"][0].total_scale == pytest.approx(8**-0.5, rel=1e-4)
    latent = sites["deepseek_v3"][0].latent
    assert (
        "8 from kv_b_proj + 4 from kv_a_proj_with_mqa, one key for all heads" in latent
    )
    assert sites["swinv2"][0].scale_parameter == "logit_scale"
    assert [site.bias for site in sites["t5"]] == [True, True, False]
    assert [site.visible[:5] for site in sites["t5"]] == ["every", "keys ", "every"]


def test_gains_are_named_by_the_parameter_that_moves_them() -> None:
    (site,) = explain("stablelm").sites
    assert site.query.parameters == tuple(
        f"q_layernorm.norms.{i}.weight" for i in range(4)
    )
    assert "q_layernorm.norms.{0-3}.weight" in site.query.text()
    (site,) = explain("chameleon").sites
    assert site.key.parameters == ("k_norm.weight", "k_norm.bias")


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        (
            "nanochat",
            (
                "RMS",
                "head",
                1e-5,
                "scalar 1.2",
                "before or after RoPE (equivalent without a gain per dim)",
            ),
        ),
        ("norm then rope", ("RMS", "head", 1e-6, "per dim", "before RoPE")),
        ("rope then norm", ("RMS", "head", 1e-6, "per dim", "after RoPE")),
        ("l2", ("L2", "head", None, "none", "")),
        ("no norm", ("none", "", None, "none", "")),
    ],
)
def test_a_hand_written_recipe_is_found(name: str, norm: tuple[Any, ...]) -> None:
    (site,) = by_hand(name).sites
    for side in (site.query, site.key):
        assert (side.kind, side.over, side.eps, side.gain, side.order) == norm
    assert (site.rotation is not None) == ("rope" in name or name == "nanochat")


def test_a_norm_that_does_nothing_is_told() -> None:
    (site,) = by_hand("never called").sites
    assert site.idle == (
        "q_norm (RMSNorm) is never called",
        "k_norm (RMSNorm) is never called",
    )
    (site,) = by_hand("thrown away").sites
    assert site.idle == (
        "q_norm (RMSNorm) is called on q, and its result is not used",
        "k_norm (RMSNorm) is called on k, and its result is not used",
    )
    assert not site.query.acts
    assert by_hand("norm then rope").sites[0].idle == ()


@pytest.mark.parametrize("axes", ["tokens", "heads"])
def test_a_norm_over_the_wrong_axis_is_told(axes: str) -> None:
    (site,) = by_hand(f"over {axes}").sites
    assert (site.query.kind, site.query.over, site.key.over) == ("RMS", axes, axes)
    assert "unusual axis" in site.query.text()


def test_what_fits_no_recipe_is_unknown_instead_of_guessed() -> None:
    (site,) = by_hand("half a head").sites
    assert site.query.kind == site.key.kind == "unknown"
    (site,) = by_hand("clamped").sites
    assert site.query.kind == site.key.kind == "unknown"
    (site,) = by_hand("convolved").sites
    assert site.query.kind == site.key.kind == "unknown"
    one_token = qkeel.explain(
        nn.Sequential(ByHand(RECIPES["norm then rope"])), torch.randn(1, 1, 32)
    )
    assert "fewer than three tokens" in str(one_token)


def test_the_model_is_bit_for_bit_what_it_was() -> None:
    model = MODELS["qwen3"]().train()
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    qkeel.explain(model, batch_for("qwen3"))
    assert model.training
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_where_the_config_says_something_else_it_is_a_sentence() -> None:
    model = nn.Sequential(ByHand(RECIPES["never called"]))
    model.config = {"use_qk_norm": True}
    (said,) = qkeel.explain(model, torch.randn(1, 6, 32)).differences
    assert (
        said
        == "config.use_qk_norm is true, but no norm is applied to q or k (everywhere)"
    )
    gemma = MODELS["gemma2"]()
    changes = {
        "attn_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 9,
    }  # after it was built
    for name, value in changes.items():
        setattr(gemma.config, name, value)
    found = qkeel.explain(gemma, batch_for("gemma2")).differences
    assert (
        "config.attn_logit_softcapping is 30.0, but the observed cap is 50 (everywhere)"
        in found
    )
    assert (
        "config.query_pre_attn_scalar 16 means logits 0.25 · q·k, but the observed scale is 0.125 (everywhere)"
        in found
    )


def test_other_arguments_and_failures_are_told() -> None:
    model = MODELS["llama"]().eval()
    batch = {
        "input_ids": batch_for("llama"),
        "attention_mask": torch.ones(2, 12, dtype=torch.int64),
    }
    assert (
        qkeel.explain(model, batch).sites
        == qkeel.explain(model, (batch["input_ids"],)).sites
    )
    with pytest.raises(InvalidTypeError, match="expected the batch as a tensor"):
        qkeel.explain(model, "lamp")
    with pytest.raises(InvalidValueError, match="forward pass"):
        qkeel.explain(model, torch.zeros(2, 3))
    with pytest.raises(RefusedError, match="no attention"):
        qkeel.explain(nn.Linear(4, 4), torch.ones(2, 4))
    own = qkeel.nn.Attention(32, 4, spec=qkeel.preset("qwen3"))
    with pytest.raises(RefusedError, match="explain"):
        qkeel.explain(own, torch.randn(1, 4, 32))


def test_the_report_groups_layers_that_work_alike() -> None:
    found = explain("gemma3")
    text = str(found)
    assert text.startswith(
        "Gemma3ForCausalLM: 2 attention layers\nmodel.layers.0.self_attn\n  heads "
    )
    assert "base 1e+06" in text
    same = dataclasses.replace(
        found,
        sites=(
            found.sites[0],
            dataclasses.replace(found.sites[0], name="model.layers.1.self_attn"),
        ),
    )
    assert "model.layers.{0-1}.self_attn" in str(same)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.sites = ()  # type: ignore[misc]


def test_names_that_differ_in_a_number_are_written_once() -> None:
    assert compress(["a.0.b", "a.1.b", "a.3.b"]) == "a.{0-1,3}.b"
    assert compress(["a.7.b"]) == "a.7.b"
    assert compress(["x", ""]) == "x, (the model)"


def test_weights_that_are_computed_from_stored_ones_are_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ByHand(RECIPES["norm then rope"]))
    x = torch.randn(2, 12, 32)
    plain = qkeel.explain(model, x)
    qkeel.apply(model, "sigma_reparam", batch=x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert str(qkeel.explain(model, x)) == str(plain)
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )
