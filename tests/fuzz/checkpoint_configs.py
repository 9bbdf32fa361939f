"""The config.json and the index next to a checkpoint, of hostile hands, for `scan` and `retrofit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.torch import save_file
from tests.fuzz.damage import Damage, damages, inflict
from tests.fuzz.hostile import values
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole

from qkeel.audit import Geometry, as_json, table
from qkeel.audit.scan import scan
from qkeel.remedies.retrofit import convert

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_MORE = [
    "query_pre_attn_scalar",
    "attention_multiplier",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "text_config",
]
_MORE += ["layer_types", "rope_parameters", "original_max_position_embeddings", "attn_config", "multi_query", "dtype"]


def _make(place: Path) -> None:
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    tensors = {f"model.layers.0.self_attn.{n}_proj.weight": torch.ones(s) for n, s in shapes.items()}
    tensors |= {f"model.layers.0.mlp.{n}_proj.weight": torch.ones(8, 8) for n in ("gate", "up", "down")}
    names = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    tensors |= {f"{n}.weight": torch.ones(8) for n in names}
    tensors |= {"model.embed_tokens.weight": torch.ones(5, 8), "lm_head.weight": torch.ones(5, 8)}
    save_file(tensors, place / "model-1.safetensors")
    (place / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def inputs() -> SearchStrategy[tuple[dict[str, Any], Damage | None, str]]:
    """Changed settings, damage to a file, and what reads them."""
    settings = st.dictionaries(st.sampled_from([*CONFIG, *_MORE]), values(), max_size=3)
    file = st.sampled_from(["config.json", "model.safetensors.index.json", "model-1.safetensors"])
    harm = st.one_of(st.none(), st.tuples(file, damages()))
    return st.tuples(settings, harm, st.sampled_from(["scan", "qwen3", "olmo2", "gemma3"]))


def check(case: tuple[dict[str, Any], Any, str]) -> None:
    """Scans or converts the folder."""
    settings, harm, reader = case
    with scratch() as place:
        source = place / "model"
        lay_out(whole(_make), source)
        (source / "config.json").write_text(json.dumps({**CONFIG, **settings}))
        if harm is not None:
            inflict(source / harm[0], harm[1])
        if reader == "scan":
            found = scan(source, flags=Geometry())
            json.dumps(as_json(found))
            table(found, every_head=True, tensors=True)
            return
        try:
            convert(source, reader, place / "out")
        finally:
            assert not list(place.glob(".*"))


HUNT = Hunt(inputs=inputs, check=check)
