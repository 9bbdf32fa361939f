"""RoPE against the rotary utilities of transformers, in each of its pairings."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from qkeel.errors import ShapeError
from qkeel.functional.rope import Pairing, rope_frequencies, rope_table, rotate
from qkeel.spec import Rope

from .float64 import float64_throughout

pytest.importorskip("transformers")

HEAD_DIM, BASE = 16, 5_000.0


def stock(package: str, config: str, rotary: str) -> tuple[Any, Any]:
    """The modeling file of a family and its rotary module with default RoPE."""
    model = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    configs = importlib.import_module(
        f"transformers.models.{package}.configuration_{package}"
    )
    made = getattr(configs, config)(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    return model, getattr(model, rotary)(made)


def real(
    package: str, config: str, rotary: str, q: Tensor, k: Tensor, pos: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotation by cos and sin tables."""
    model, table = stock(package, config, rotary)
    return model.apply_rotary_pos_emb(q, k, *table(q, pos))


def complex_numbers(q: Tensor, k: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's rotation, a product of complex numbers."""
    model, table = stock("llama4", "Llama4TextConfig", "Llama4TextRotaryEmbedding")
    rotated = model.apply_rotary_emb(
        q.transpose(1, 2), k.transpose(1, 2), table(q, pos)
    )
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


ORACLES = [
    ("half", lambda *x: real("llama", "LlamaConfig", "LlamaRotaryEmbedding", *x)),
    (
        "interleaved",
        lambda *x: real("cohere", "CohereConfig", "CohereRotaryEmbedding", *x),
    ),
    ("interleaved", complex_numbers),
    (
        "half_reversed",
        lambda *x: real("nanochat", "NanoChatConfig", "NanoChatRotaryEmbedding", *x),
    ),
]
IDS = ["llama", "cohere", "llama4", "nanochat"]


def draw(largest: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    pos = torch.randint(largest, (2, 9))
    return torch.randn(2, 2, 9, HEAD_DIM), torch.randn(2, 2, 9, HEAD_DIM), pos


@pytest.mark.parametrize(("pairing", "oracle"), ORACLES, ids=IDS)
def test_rotation_is_that_of_transformers(pairing: Pairing, oracle: Any) -> None:
    q, k, pos = draw(largest=64)
    theirs = oracle(q, k, pos)
    ours = Rope(base=BASE, pairing=pairing).encode(q, k, pos, pos)
    for a, b in zip(theirs, ours):
        # Both tables are float32; an angle of up to 64 radians rounds by 4e-6.
        assert (a - b).abs().max() <= 2e-5


@pytest.mark.parametrize(("pairing", "oracle"), ORACLES, ids=IDS)
def test_rotation_is_that_of_transformers_in_float64_at_any_position(
    pairing: Pairing, oracle: Any
) -> None:
    with float64_throughout():
        q, k, pos = draw(largest=100_000)
        theirs = oracle(q, k, pos)
        ours = Rope(base=BASE, pairing=pairing).encode(q, k, pos, pos)
        for a, b in zip(theirs, ours):
            assert (a - b).abs().max() <= 1e-9
            assert (a - q).abs().max() > 0.1


def test_reversed_halves_turn_the_other_way() -> None:
    q, _, pos = draw(largest=64)
    q = q.double()
    cos, sin = rope_table(pos[:, None], rope_frequencies(HEAD_DIM), q.dtype)
    assert torch.equal(
        rotate(q, cos, sin, "half_reversed"), rotate(q, cos, -sin, "half")
    )


def test_transformers_has_one_frequency_too_many_for_an_odd_rotary_dim_where_qkeel_refuses() -> (
    None
):
    # StableLM's 0.25 of head_dim 12 is 3 dimensions: half a pair.
    model = importlib.import_module("transformers.models.llama.modeling_llama")
    config = importlib.import_module(
        "transformers.models.llama.configuration_llama"
    ).LlamaConfig(hidden_size=3, num_attention_heads=1, head_dim=3)
    assert model.LlamaRotaryEmbedding(config).inv_freq.shape == (2,)
    with pytest.raises(ShapeError, match="even number of dimensions; got 3"):
        rope_frequencies(3)
