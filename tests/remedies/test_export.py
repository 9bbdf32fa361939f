"""Checkpoints in another shape: transformers loads them with the same outputs; what has no such shape is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.drawing import randint
from tests.each_row import each_row
from tests.training import warned

import qkeel
from qkeel.cli.app import main
from qkeel.errors import DataError, RefusedError, RunDirectoryError, UnknownNameError
from qkeel.remedies.retrofit import RetrofitConfig, convert, export, export_model

from .models import decoder

transformers = pytest.importorskip("transformers")

SIZES = {
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
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA = {**SIZES, "rope_parameters": ROPE, "rms_norm_eps": 1e-5}
BIASED, TIED = {"attention_bias": True}, {"tie_word_embeddings": True}
WIDE = {"head_dim": 12}
WINDOW = {"sliding_window": 6}
WINDOWS = {**WINDOW, "use_sliding_window": True, "max_window_layers": 0}
# The config of the Qwen3, and the class of the source's config with its own.
CASES = {
    "llama": ({**LLAMA, "head_dim": 4}, "Llama", LLAMA),
    "llama tied": ({**LLAMA, "head_dim": 4, **TIED}, "Llama", {**LLAMA, **TIED}),
    "llama with biases": ({**LLAMA, "head_dim": 4, **BIASED}, "Llama", {**LLAMA, **BIASED}),
    "llama with wide heads": ({**LLAMA, **WIDE}, "Llama", {**LLAMA, **WIDE}),
    "mistral": ({**LLAMA, "head_dim": 4, **WINDOWS}, "Mistral", {**LLAMA, **WINDOW}),
    "qwen2": ({**LLAMA, "head_dim": 4, **BIASED}, "Qwen2", LLAMA),
}  # fmt: skip
TOKENS = randint(3, 23, (2, 20), seed=1)


def before(case):
    """A Qwen3, its weights as the source has them, and the source's config.

    Every gain and bias is off its starting value, so that one left out or in the wrong place shows."""
    options, kind, own = CASES[case]
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.3 if p.ndim < 2 else 0.1) * torch.randn_like(p))
            if case == "qwen2" and name.endswith("o_proj.bias"):
                p.zero_()
    weights = model.state_dict()
    for name in list(weights):
        is_tied = case == "llama tied" and name == "lm_head.weight"
        if is_tied or (case == "qwen2" and name.endswith("o_proj.bias")):
            del weights[name]
    config = getattr(transformers, f"{kind}Config")(**own).to_dict()
    return model.eval(), weights, {**config, "architectures": ["Whatever"]}


def stored(folder, weights, config, shards=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    file_of = {n: f"part-{i % shards}.safetensors" for i, n in enumerate(weights)}
    for file in set(file_of.values()):
        own = {
            n: w.contiguous().clone() for n, w in weights.items() if file_of[n] == file
        }
        save_file(own, folder / file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_loads_as(out, model, tolerance=5e-7):
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        # In double precision, so that only what was stored differs, and that in its rounding.
        logits, expected = (m.eval().double()(TOKENS).logits for m in (loaded, model))
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_was_written_with_identical_outputs(case, tmp_path):
    model, weights, config = before(case)
    source = stored(tmp_path / "in", weights, config)
    files = {f.name: f.read_bytes() for f in source.iterdir()}
    out = convert(source, "qwen3", tmp_path / "deep" / "out")
    assert_loads_as(out, model)
    written = json.loads((out / "config.json").read_text())
    # Other programs read window settings that transformers leaves aside where it finds the layers' types.
    assert CASES[case][0].items() <= written.items()
    assert written["architectures"] == [type(model).__name__]
    assert {f.name: f.read_bytes() for f in source.iterdir()} == files
    assert (out / "tokenizer.json").exists()
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["out"]


def test_files_are_cut_where_they_would_be_too_large_and_old_configs_are_understood(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(export_model, "SHARD_BYTES", 6000)
    model, weights, config = before("llama")
    for name in ("rope_parameters", "head_dim", "tie_word_embeddings"):
        config.pop(name, None)
    config |= {"rope_theta": 5000.0, "rope_scaling": None}
    source = stored(tmp_path / "in", weights, config, shards=3)
    out = convert(source, "qwen3", tmp_path / "out")
    sizes = [f.stat().st_size for f in out.glob("model-*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 8000
    assert_loads_as(out, model)


def test_another_eps_of_the_norm_goes_into_the_weights_where_that_is_exact(
    tmp_path,
):
    model, weights, config = before("llama")
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.variance_epsilon = 4e-3
    source = stored(tmp_path / "in", weights, config)
    assert_loads_as(convert(source, "qwen3", tmp_path / "out", norm_eps=4e-3), model)
    with warned() as caught:
        convert(source, "qwen3", tmp_path / "assumed")
    # Its outputs differ.
    assert "eps 1e-05" in caught[0]
    assert "norm_eps" in caught[0]
    low = {n: w.bfloat16() for n, w in weights.items()}
    source = stored(tmp_path / "low", low, config)
    with pytest.raises(RefusedError):  # it would round the weights
        convert(source, "qwen3", tmp_path / "no", norm_eps=4e-3)


NORM = "model.layers.1.self_attn.q_norm.weight"
UP = "model.layers.2.mlp.up_proj.weight"
GATE = "model.layers.0.self_attn.gate_proj.weight"
POST = "model.layers.0.attention_post_norm.weight"


@each_row(
    "removed, added, config",
    [
        (NORM, {}, {}),
        (UP, {}, {}),
        ("lm_head.weight", {}, {"tie_word_embeddings": False}),
        ("", {GATE: torch.ones(2)}, {}),
        ("", {POST: torch.ones(16)}, {}),
        ("", {NORM: torch.ones(16)}, {}),
        ("", {}, {"model_type": "gpt2"}),
        ("", {}, {"mlp_bias": True}),
        ("", {}, {"hidden_size": None}),
    ],
)
def test_what_a_qwen3_does_not_compute_is_refused_and_nothing_is_written(
    removed, added, config, tmp_path_factory
):
    _, weights, own = before("llama")
    weights = {n: w for n, w in {**weights, **added}.items() if n != removed}
    place = tmp_path_factory.mktemp("refused")
    source = stored(place / "in", weights, {**own, **config})
    with pytest.raises(RefusedError):
        convert(source, "qwen3", place / "out")
    assert [f.name for f in place.iterdir()] == ["in"]


def test_bad_places_and_bad_files_are_one_clear_error_and_lose_nothing(
    tmp_path, monkeypatch, capsys
):
    _, weights, config = before("llama")
    source, out = stored(tmp_path / "in", weights, config), tmp_path / "out"

    def refused(error, *arguments):
        with pytest.raises(error):
            convert(*arguments)

    refused(RunDirectoryError, source, "qwen3", source)
    refused(DataError, tmp_path / "no", "qwen3", out)
    refused(DataError, source / "config.json", "qwen3", out)
    refused(UnknownNameError, source, "qwen", out)
    assert main(["convert", str(tmp_path), "--to", "qwen3", "--out", str(out)]) == 2

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export_model, "write_json", full)
        refused(RunDirectoryError, source, "qwen3", out)
    (source / "config.json").rename(tmp_path / "config.json")
    refused(DataError, source, "qwen3", out)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "in"]
    (tmp_path / "config.json").rename(source / "config.json")
    capsys.readouterr()
    assert main(["convert", str(source), "--to", "qwen3", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)


def test_an_export_is_what_the_model_in_memory_computes_or_is_refused(
    tmp_path,
):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    model.generation_config.eos_token_id = [1, 2]
    model.lm_head.weight = model.model.embed_tokens.weight  # without a word in config
    with pytest.raises(RefusedError):
        export(model, "qwen3", tmp_path / "no")
    config = RetrofitConfig(iterations=1, eps=1e-3)
    with qkeel.retrofit(model, "qk_norm:gain=one_plus_dim", TOKENS, config=config):
        out = export(model, "qwen3", tmp_path / "out")
        assert_loads_as(out, model)
        capped = qkeel.apply(model, "final_softcap:module=lm_head", batch=TOKENS)
        with capped, pytest.raises(RefusedError):
            export(model, "qwen3", tmp_path / "no")
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [1, 2]
    with pytest.raises(RefusedError):
        export(decoder(), "qwen3", tmp_path / "no")
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_norm_over_all_heads_is_no_qwen3(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    qkeel.apply(model, "qk_norm:over=layer", batch=TOKENS)
    with pytest.raises(RefusedError, match="each head"):
        export(model, "qwen3", tmp_path / "no")
