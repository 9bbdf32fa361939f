"""The constants of a preset are those of the config that transformers ships, or of the named release."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from qkeel.spec import NoNorm, Rope, preset

from .families import FAMILIES, Family

pytest.importorskip("transformers")

# Where a config class leaves its model's constants to the checkpoint: what the released checkpoints say.
RELEASED = {
    ("qwen3", "base"): 1_000_000.0,
    ("qwen3_next", "base"): 10_000_000.0,
    ("olmo2", "base"): 500_000.0,
    ("olmo2", "eps"): 1e-6,
    ("minimax_m2", "rotary"): 0.5,  # rotary_dim 64 of head_dim 128
    ("nanochat", "base"): 100_000.0,  # upstream's; the port's class says 10,000
}
ROTARY = [family for family in FAMILIES if family.rotary]


@pytest.mark.parametrize("family", ROTARY, ids=lambda family: family.name)
def test_preset_constants_are_those_of_the_shipped_config(family: Family) -> None:
    configs = importlib.import_module(
        f"transformers.models.{family.package}.configuration_{family.package}"
    )
    config = getattr(configs, family.config)()
    rope: dict[str, Any] = config.rope_parameters
    rope = rope[family.layer_type] if family.layer_type else rope
    spec = preset(family.name)
    assert isinstance(spec.position, Rope)
    ours = {"base": spec.position.base, "rotary": spec.position.rotary}
    theirs = {
        "base": rope["rope_theta"],
        "rotary": rope.get("partial_rotary_factor", 1.0),
    }
    if not isinstance(spec.norm, NoNorm):
        ours["eps"] = spec.norm.eps
        theirs["eps"] = getattr(config, "layer_norm_eps", None) or config.rms_norm_eps
    for name in ours:
        assert ours[name] == RELEASED.get((family.name, name), theirs[name]), name


def test_gemma_constants_are_those_of_the_shipped_config() -> None:
    configs = importlib.import_module("transformers.models.gemma2.configuration_gemma2")
    config, spec = configs.Gemma2Config(), preset("gemma2")
    assert spec.cap.cap == config.attn_logit_softcapping == 50.0
    assert spec.scale.dim == config.query_pre_attn_scalar == 256
    assert preset("gemma3").scale.dim == 256


def test_llama4_temperature_constants_are_those_of_the_shipped_config() -> None:
    configs = importlib.import_module("transformers.models.llama4.configuration_llama4")
    config, scale = configs.Llama4TextConfig(), preset("llama4_nope").scale
    assert (scale.alpha, scale.floor) == (config.attn_scale, config.floor_scale)


def test_the_base_of_ngpt_is_that_of_its_authors_code() -> None:
    spec = preset("ngpt")  # NVIDIA/ngpt, model.py: sinusoids of 10000
    assert isinstance(spec.position, Rope)
    assert spec.position.base == 10_000.0
