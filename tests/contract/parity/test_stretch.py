"""Slowed rotations are those of transformers where it has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkeel.functional.rope import rope_frequencies
from qkeel.spec import NTK, PI, DynamicNTK, Llama3, YaRN

rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
from transformers import LlamaConfig  # noqa: E402

CASES: dict[str, tuple[dict[str, Any], PI | NTK | DynamicNTK | Llama3 | YaRN]] = {
    "linear": ({"factor": 8.0}, PI(factor=8)),
    "yarn": (
        {"factor": 8.0, "original_max_position_embeddings": 512},
        YaRN(factor=8, train_length=512),
    ),
    "yarn, 2048": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16,
            "beta_slow": 2,
        },
        YaRN(factor=4, train_length=2048, fast=16, slow=2),
    ),
    "yarn, own factor": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.1,
        },
        YaRN(factor=4, train_length=2048, attention_factor=1.1),
    ),
    "llama3": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        Llama3(factor=8, train_length=8192),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("head_dim", "base"), [(64, 10_000.0), (128, 500_000.0)])
def test_frequencies_and_magnitude_are_those_of_transformers(
    name: str, head_dim: int, base: float
) -> None:
    options, stretch = CASES[name]
    kind = name.partition(",")[0]
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": base, **options},
    )
    theirs, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours = stretch.frequencies(
        rope_frequencies(head_dim, base), base, torch.arange(8)[None]
    )
    assert torch.allclose(ours.float(), theirs, rtol=1e-6)
    assert stretch.magnitude == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [100, 512, 513, 4096])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_dynamic_ntk_is_that_of_transformers_at_every_length(
    length: int, factor: float
) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor},
    )
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    stretch = DynamicNTK(train_length=512, factor=factor)
    ours = stretch.frequencies(rope_frequencies(64), 1e4, torch.arange(length)[None])
    assert torch.allclose(ours.float(), theirs, rtol=1e-6)


def test_ntk_exact_is_dynamic_ntk_at_a_fixed_length() -> None:
    theta = rope_frequencies(64)
    fixed = NTK(factor=8, kind="exact").frequencies(theta, 1e4, torch.zeros(1, 1))
    assert torch.allclose(
        fixed,
        DynamicNTK(train_length=512).frequencies(theta, 1e4, torch.tensor([[4095]])),
    )
