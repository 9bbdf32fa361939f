"""Checkpoints in another shape: transformers loads them with the same outputs; what has no such shape is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import qkeel
from qkeel.cli.app import main
from qkeel.errors import (
    DataError,
    QkeelError,
    RefusedError,
    RunDirectoryError,
    UnknownNameError,
)
from qkeel.remedies.retrofit import SHAPES, convert, export

from .models import decoder

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.randint(3, 23, (2, 20), generator=torch.Generator().manual_seed(1))


def moved(model: nn.Module) -> nn.Module:
    """Every gain and bias off its starting value, so that one left out or in the wrong place shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.3 if p.ndim < 2 else 0.1) * torch.randn_like(p))
    return model.eval()


def before(kind: str) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """A model of the architecture aimed at, its weights under the names of the source, and the source's config."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if kind == "gemma2 to gemma3":
        options = {
            **SIZES,
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 13,
        }
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        both = {"full_attention": rope, "sliding_attention": rope}
        config = transformers.Gemma3TextConfig(
            **options,
            layer_types=kinds,
            rope_parameters=both,
            final_logit_softcapping=9.0,
        )
        model = moved(transformers.Gemma3ForCausalLM(config))
        weights = {
            n: w + 1 if "self_attn" in n and "norm" in n else w
            for n, w in model.state_dict().items()
        }
        source = transformers.Gemma2Config(
            **options,
            attn_logit_softcapping=None,
            final_logit_softcapping=9.0,
            rope_parameters=rope,
            layer_types=kinds,
        )
        return (
            model,
            {n: w for n, w in weights.items() if n != "lm_head.weight"},
            source,
        )
    if kind == "llama to olmo2":
        model = moved(
            transformers.Olmo2ForCausalLM(
                transformers.Olmo2Config(
                    **SIZES, rope_parameters=rope, rms_norm_eps=1e-5
                )
            )
        )
        names = {
            "post_attention_layernorm": "attention_post_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
        weights = {}
        for name, w in model.state_dict().items():
            for new, old in names.items():
                name = name.replace(new, old)
            weights[name] = w
        return (
            model,
            weights,
            transformers.LlamaConfig(**SIZES, rope_parameters=rope, rms_norm_eps=1e-5),
        )
    options = {**SIZES, "rope_parameters": rope, "rms_norm_eps": 1e-5}
    more: dict[str, Any] = {
        "llama with biases": {"attention_bias": True},
        "qwen2": {"attention_bias": True},
    }.get(kind, {})
    if kind == "mistral":
        more = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    tied = kind == "llama tied"
    head = 4 if kind != "llama with wide heads" else 12
    config = transformers.Qwen3Config(
        **options, head_dim=head, tie_word_embeddings=tied, **more
    )
    model = moved(transformers.Qwen3ForCausalLM(config))
    if kind == "qwen2":
        for layer in model.model.layers:  # type: ignore[union-attr]
            nn.init.zeros_(layer.self_attn.o_proj.bias)
    weights = {
        n: w
        for n, w in model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    if kind == "qwen2":
        weights = {n: w for n, w in weights.items() if not n.endswith("o_proj.bias")}
        return model, weights, transformers.Qwen2Config(**options)
    if kind == "mistral":
        return model, weights, transformers.MistralConfig(**options, sliding_window=6)
    source = transformers.LlamaConfig(
        **options, head_dim=head, tie_word_embeddings=tied, attention_bias=bool(more)
    )
    return model, weights, source


def stored(
    place: Path, weights: dict[str, Tensor], config: Any, shards: int = 1
) -> Path:
    place.mkdir()
    config.architectures = ["Whatever"]
    config.save_pretrained(place)
    names = list(weights)
    parts = [names[i::shards] for i in range(shards)]
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"part-{i}.safetensors" for i in range(shards)]
    )
    for file, part in zip(files, parts):
        save_file({n: weights[n].contiguous().clone() for n in part}, place / file)
    if shards > 1:
        index = {
            "metadata": {},
            "weight_map": {n: f for f, part in zip(files, parts) for n in part},
        }
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "tokenizer.json").write_text("{}")
    return place


KINDS = {
    "llama": "qwen3",
    "llama tied": "qwen3",
    "llama with biases": "qwen3",
    "llama with wide heads": "qwen3",
    "mistral": "qwen3",
    "qwen2": "qwen3",
    "llama to olmo2": "olmo2",
    "gemma2 to gemma3": "gemma3",
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_was_written_with_identical_outputs(
    kind: str, shards: int, tmp_path: Path
) -> None:
    model, weights, config = before(kind)
    source = stored(tmp_path / "in", weights, config, shards)
    files = {f.name: f.read_bytes() for f in source.iterdir()}
    out = convert(source, KINDS[kind], tmp_path / "deep" / "out")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert type(loaded) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert (loaded.eval()(TOKENS).logits - model(TOKENS).logits).abs().max() <= 1e-6
    assert {f.name: f.read_bytes() for f in source.iterdir()} == files
    assert (out / "tokenizer.json").exists()
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["out"]


def test_old_configs_without_rope_parameters_are_understood(tmp_path: Path) -> None:
    model, weights, config = before("llama")
    source = stored(tmp_path / "in", weights, config)
    old = json.loads((source / "config.json").read_text())
    del old["rope_parameters"], old["head_dim"], old["tie_word_embeddings"]
    (source / "config.json").write_text(
        json.dumps(
            {
                **old,
                "rope_theta": 5000.0,
                "rope_scaling": None,
                "torch_dtype": "float32",
            }
        )
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        convert(source, "qwen3", tmp_path / "out")
    ).eval()
    assert (loaded(TOKENS).logits - model(TOKENS).logits).abs().max() <= 1e-6


@pytest.mark.parametrize("eps", [None, "1e-6", True])
def test_an_eps_that_is_no_number_is_one_clear_error(
    eps: object, tmp_path: Path
) -> None:
    _, weights, config = before("llama")
    source = stored(tmp_path / "in", weights, config)
    old = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**old, "rms_norm_eps": eps}))
    with pytest.raises(QkeelError, match="expected a number"):
        convert(source, "qwen3", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_eps_of_the_norm_goes_into_the_weights_where_that_is_exact(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, weights, config = before("llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.variance_epsilon = 4e-3
    source = stored(
        tmp_path / "in", {n: w.to(dtype) for n, w in weights.items()}, config
    )
    if dtype == torch.bfloat16:
        with pytest.raises(RefusedError, match="would round them"):
            convert(source, "qwen3", tmp_path / "out", norm_eps=4e-3)
        assert sorted(f.name for f in tmp_path.iterdir()) == ["in"]
        return
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        convert(source, "qwen3", tmp_path / "out", norm_eps=4e-3)
    )
    assert (loaded.eval()(TOKENS).logits - model(TOKENS).logits).abs().max() <= 2e-6
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        convert(source, "qwen3", tmp_path / "plain")
    )
    assert (plain.eval()(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-4


def test_gains_alike_for_all_heads_become_one_gain_and_others_are_refused(
    tmp_path: Path,
) -> None:
    model, weights, config = before("llama")
    alike = {
        n: w.expand(4 if "q_norm" in n else 2, 4)
        if "self_attn" in n and "norm" in n
        else w
        for n, w in weights.items()
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        convert(stored(tmp_path / "alike", alike, config), "qwen3", tmp_path / "out")
    )
    assert torch.equal(loaded.eval()(TOKENS).logits, model(TOKENS).logits)
    unlike = {
        n: w * torch.arange(1, len(w) + 1)[:, None]
        if w.shape[-1] == 4 and w.ndim == 2 and "norm" in n
        else w
        for n, w in alike.items()
    }
    with pytest.raises(RefusedError, match="differs from head to head"):
        convert(
            stored(tmp_path / "unlike", unlike, config), "qwen3", tmp_path / "other"
        )


def spoiled(kind: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if kind == "no norms":
        return {
            n: w for n, w in weights.items() if "self_attn" not in n or "norm" not in n
        }
    if kind == "norms after the branches":
        return {
            n.replace("input_layernorm", "attention_post_norm"): w
            for n, w in weights.items()
        }
    if kind == "more tensors":
        return {**weights, "model.layers.0.self_attn.gate_proj.weight": torch.ones(2)}
    if kind == "fewer tensors":
        return {
            n: w for n, w in weights.items() if n != "model.layers.2.mlp.up_proj.weight"
        }
    if kind == "no head":
        return {n: w for n, w in weights.items() if n != "lm_head.weight"}
    if kind == "norms over all heads":
        return {n: w.repeat(4) if "q_norm" in n else w for n, w in weights.items()}
    return weights


REFUSED = {
    "no norms": "q and k are not normed yet",
    "another family": "model of type 'gpt2' cannot become qwen3.*llama or mistral or qwen2",
    "a bias in the MLP": "mlp_bias = True",
    "norms after the branches": "attention_post_norm.weight: qwen3 has no such norm",
    "more tensors": "also has model.layers.0.self_attn.gate_proj.weight",
    "fewer tensors": "lacks model.layers.2.mlp.up_proj.weight",
    "no head": "lacks lm_head.weight",
    "norms over all heads": r"has shape \(16,\), but qwen3 has one gain of 4 numbers",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_architecture_does_not_compute_is_refused_and_nothing_is_written(
    kind: str, tmp_path: Path
) -> None:
    _, weights, config = before("llama")
    source = stored(tmp_path / "in", spoiled(kind, weights), config)
    said = json.loads((source / "config.json").read_text())
    other = {
        "another family": {"model_type": "gpt2"},
        "a bias in the MLP": {"mlp_bias": True},
    }.get(kind, {})
    (source / "config.json").write_text(json.dumps({**said, **other}))
    with pytest.raises(RefusedError, match=REFUSED[kind]):
        convert(source, "qwen3", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("to", ["olmo2", "gemma3"])
def test_a_llama_is_no_olmo_2_and_no_gemma_3(to: str, tmp_path: Path) -> None:
    _, weights, config = before("llama")
    reason = (
        "norms after attention and MLP"
        if to == "olmo2"
        else r"embeddings times √hidden_size.*from gemma2"
    )
    with pytest.raises(RefusedError, match=reason):
        convert(stored(tmp_path / "in", weights, config), to, tmp_path / "out")


def test_a_gemma_2_with_its_cap_is_no_gemma_3(tmp_path: Path) -> None:
    _, weights, config = before("gemma2 to gemma3")
    config.attn_logit_softcapping = 50.0
    with pytest.raises(RefusedError, match=r"attn_logit_softcapping = 50.0"):
        convert(stored(tmp_path / "in", weights, config), "gemma3", tmp_path / "out")


def test_bad_places_and_bad_files_are_one_clear_error_and_lose_nothing(
    tmp_path: Path,
) -> None:
    _, weights, config = before("llama")
    source = stored(tmp_path / "in", weights, config)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    cases: list[tuple[type[QkeelError], str, Path, Path]] = [
        (RunDirectoryError, "will not be overwritten", source, full),
        (RunDirectoryError, "is the checkpoint itself", source, source),
        (DataError, "does not exist", tmp_path / "no", tmp_path / "out"),
        (
            DataError,
            "is a file; expected a folder",
            source / "config.json",
            tmp_path / "out",
        ),
    ]
    for error, message, given, out in cases:
        with pytest.raises(error, match=message):
            convert(given, "qwen3", out)
    with pytest.raises(UnknownNameError, match="Did you mean 'qwen3'"):
        convert(source, "qwen", tmp_path / "out")
    assert (full / "mine").read_text() == "precious"
    (source / "model.safetensors").write_bytes(
        (source / "model.safetensors").read_bytes()[:-9]
    )
    with pytest.raises(DataError, match="truncated"):
        convert(source, "qwen3", tmp_path / "out")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(RefusedError, match="pickle"):
        convert(source, "qwen3", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["full", "in"]


def test_a_failure_half_way_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, weights, config = before("llama")
    source = stored(tmp_path / "in", weights, config, shards=2)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qkeel.remedies.retrofit.export_model.write_json", full)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        convert(source, "qwen3", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["in"]


def test_the_command_writes_the_same_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, weights, config = before("llama")
    source = stored(tmp_path / "in", weights, config)
    assert (
        main(["convert", str(source), "--to", "qwen3", "--out", str(tmp_path / "out")])
        == 0
    )
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(
            file.get_tensor("model.layers.1.self_attn.q_norm.weight"),
            weights["model.layers.1.self_attn.q_norm.weight"],
        )
    assert (
        main(["convert", str(source), "--to", "olmo2", "--out", str(tmp_path / "no")])
        == 2
    )
    assert "olmo2 has no such norm" in capsys.readouterr().err


def test_models_that_are_not_of_transformers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="expected a transformers model"):
        export(decoder(), "qwen3", tmp_path / "out")
    assert set(SHAPES) == {"qwen3", "olmo2", "gemma3"}


def test_the_generation_config_of_a_model_in_memory_is_kept(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.generation_config.eos_token_id = [1, 2]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.6
    with qkeel.apply(model, "qk_norm", batch=TOKENS):
        export(model, "qwen3", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out"
    ).generation_config
    assert (loaded.eos_token_id, loaded.do_sample, loaded.temperature) == (
        [1, 2],
        True,
        0.6,
    )
