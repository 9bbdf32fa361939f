"""What cannot be read gets one clear error."""

import json
import pickle
import sys

import pytest
import torch
from safetensors.torch import save_file

from audit.models import save
from qkeel.audit import Geometry
from qkeel.audit.scan import scan
from qkeel.errors import DataError, InvalidValueError, RefusedError, UnknownNameError


def test_many_tensors_take_time_in_proportion(tmp_path):
    """Of the others in the file, none is looked at for each weight."""
    counts = []
    for n in (20, 80):
        tensors = {
            f"h.{i}.attn.{x}_proj.weight": torch.eye(8) for i in range(n) for x in "qk"
        }
        save_file(tensors, tmp_path / f"{n}.safetensors")
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            scan(tmp_path / f"{n}.safetensors", flags=Geometry(n_heads=2))
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert counts[1] < 5 * counts[0]


def test_pickles_are_refused_unopened_with_the_way_to_convert(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was opened",))

    for name in ("pytorch_model.bin", "model.pt", "last.ckpt", "renamed.safetensors"):
        file = tmp_path / name / name
        file.parent.mkdir()
        file.write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(RefusedError, match="save_file"):
            scan(file)
        if not name.endswith(".safetensors"):
            with pytest.raises(RefusedError, match="pickle"):
                scan(file.parent)
    torch.save({"a": torch.ones(2)}, tmp_path / "zip.safetensors")
    with pytest.raises(RefusedError, match="pickle"):
        scan(tmp_path / "zip.safetensors")


def test_a_file_cut_anywhere_is_truncated(tmp_path):
    save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for keep in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"truncated or not a safetensors"):
            scan(tmp_path)


def test_a_missing_file_and_a_folder_without_weights_are_told(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        scan(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"does not contain a \.safetensors file"):
        scan(tmp_path)
    (tmp_path / "unet").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "unet" / "x.safetensors")
    with pytest.raises(DataError, match="unet"):  # a pipeline of diffusers
        scan(tmp_path)


def test_unknown_names_are_listed_with_the_known_ones(tmp_path):
    save_file({"lamp.weight": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(UnknownNameError, match=r"q_proj/k_proj.*lamp\.weight"):
        scan(tmp_path / "x.safetensors")


def test_head_counts_below_one_are_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="n_heads"):
        scan(tmp_path, flags=Geometry(n_heads=0))


SCALES = [f'{{"query_pre_attn_scalar": {x}}}' for x in ('"many"', "true", "-1")]


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"num_attention_heads": "four"}', *SCALES]
)
def test_a_config_that_cannot_be_read_is_told(text, tmp_path):
    save("llama", tmp_path)
    if "scalar" in text:
        config = json.loads((tmp_path / "config.json").read_text())
        text = json.dumps(config | json.loads(text))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json"):
        scan(tmp_path)


def test_an_index_that_lies_is_told(tmp_path):
    save("llama", tmp_path, max_shard_size="8KB")
    file = tmp_path / "model.safetensors.index.json"
    weights = json.loads(file.read_text())["weight_map"]
    for value, expected in (
        ([], "it holds a list"),
        ({}, "weight_map"),
        ({"weight_map": {"a": 1}}, "weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "weight_map"),
        ({"weight_map": {**weights, "lamp": "model-9.safetensors"}}, "lacks model-9"),
        ({"weight_map": {**weights, "lamp": min(weights.values())}}, "lamp"),
    ):
        file.write_text(json.dumps(value))
        with pytest.raises(DataError, match=expected):
            scan(tmp_path)


def test_a_shard_that_is_gone_cut_short_or_a_pickle_is_named(tmp_path):
    save("llama", tmp_path, max_shard_size="8KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{shard.name} is truncated"):
        scan(tmp_path)
    shard.write_bytes(b"\x80\x04" + whole)
    with pytest.raises(RefusedError, match=shard.name):
        scan(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=shard.name):
        scan(tmp_path)
