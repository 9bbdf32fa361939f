"""The recipes: what they build, that they train and go on, how fast a run says it is, and what one step takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from qkeel.cli.app import main
from qkeel.cli.run import configure, view
from qkeel.errors import DataError, InvalidValueError, UnknownNameError
from qkeel.functional.logits import deepnorm
from qkeel.lab import DataConfig, ModelConfig, RunConfig, Watcher, run
from qkeel.lab.build_run import build_decoder
from qkeel.lab.checkpoint import RunState
from qkeel.lab.text import load
from qkeel.lab.train import train_step
from qkeel.nn import Decoder
from qkeel.records import RunDirectory

FOLDER = Path(__file__).parents[2] / "experiments" / "recipes"
RECIPES = ("gau-100m-512", "mha-100m-512")
# Everything of the recipe but its size: 3 steps in a second.
SMALL = "--d-model 48 --n-layers 2 --context 32 --batch 4 --accumulate 2 --steps 3 --log-every 1 --checkpoint-every 2"
QUICK = "--no-compile --device cpu --eval-every 0 --eval-sequences 2 --probe-sequences 1"


def recipe(name: str) -> RunConfig:
    return configure(view()(), FOLDER / f"{name}.toml")[0]


def built(config: RunConfig, vocab_size: int = 256) -> Decoder:
    with torch.device("meta"):
        return build_decoder(config.model, vocab_size, config.data.context)


def weights(model: Decoder) -> int:
    return sum(p.numel() for block in model.blocks for p in block.parameters())


def test_the_two_recipes_are_24_gated_units_and_one_of_as_many_weights() -> None:
    gau, mha = (recipe(name) for name in RECIPES)
    assert weights(built(gau)) == 24 * 3_637_504
    assert weights(built(mha)) == pytest.approx(weights(built(gau)), rel=2e-4)
    first = built(gau).blocks[0]
    assert (first.norm_order, first.alpha) == ("post", deepnorm(24)[0])
    same = {"model": gau.model, "accumulate": gau.accumulate}
    assert dataclasses.replace(mha, **same) == gau


@pytest.mark.parametrize("name", RECIPES)
def test_a_small_copy_of_a_recipe_trains_three_steps_and_goes_on_to_the_same_weights(name: str, tmp_path: Path) -> None:
    heads = ["--head-dim", "16"] if name.startswith("gau") else ["--n-heads", "4"]
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 5000, dtype=np.uint8)))
    words = ["run", str(FOLDER / f"{name}.toml"), "--data", str(text), *SMALL.split(), *QUICK.split(), *heads]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    whole = RunDirectory(tmp_path / "a")
    assert [record["step"] for record in whole.metrics()] == [0, 1, 2, 3]
    assert whole.metrics()[0]["tokens_per_second"] is None
    assert all(record["tokens_per_second"] > 0 for record in whole.metrics()[1:])
    config = RunConfig.from_dict(whole.config())
    seen: list[int] = []
    stop = Watcher(on_record=lambda record: seen.append(record["step"]), should_stop=lambda: 1 in seen)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "b", watcher=stop)
    again = run(config, tmp_path / "b")
    ours, theirs = (safetensors.torch.load_file(place.checkpoint) for place in (again, whole))
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    assert [r["train_loss"] for r in again.metrics()] == [r["train_loss"] for r in whole.metrics()]


def test_a_batch_in_parts_has_the_gradient_of_the_whole() -> None:
    config = RunConfig(
        model=ModelConfig(d_model=16, n_heads=2),
        data=DataConfig(source="topics", context=8, batch=6),
        device="cpu",
        dtype="fp32",
    )
    both = [RunState(dataclasses.replace(config, accumulate=n)) for n in (1, 3)]
    for step in range(2):
        (loss, norm), (other, other_norm) = (train_step(state, step) for state in both)
        assert float(other) == pytest.approx(float(loss), rel=1e-5)
        assert float(other_norm) == pytest.approx(float(norm), rel=1e-4)
    with pytest.raises(InvalidValueError, match="multiple of accumulate, got 6 and 4"):
        dataclasses.replace(config, accumulate=4)


def test_settings_that_say_nothing_leave_the_names_of_older_runs_alone() -> None:
    assert RunConfig().run_id == "cf422ce207c8"
    assert RunConfig(model=ModelConfig(block="gau", n_heads=1), steps=7).run_id == "a4415ee675be"
    for younger in ({"position": "nope"}, {"mlp_ratio": 3.0}):
        assert RunConfig(model=ModelConfig(**younger)).run_id != "cf422ce207c8"  # type: ignore[arg-type]
    assert RunConfig(accumulate=2).run_id != "cf422ce207c8"


def test_tokens_of_one_byte_are_read_where_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bytes.bin"
    np.arange(200, dtype="u1").tofile(path)
    corpus = load(DataConfig(source=f"{path}#uint8", context=8))
    assert corpus.train.tolist() == list(range(180))
    assert corpus.vocab_size == 200
    with pytest.raises(UnknownNameError, match=r"Did you mean .*'uint16'"):
        load(DataConfig(source=f"{path}#uint32", context=8))
    np.arange(201, dtype="u1").tofile(path)
    with pytest.raises(DataError, match=r"bytes\.bin#uint8"):
        load(DataConfig(source=str(path), context=8))


def test_the_position_of_a_run_gets_its_training_length() -> None:
    config = RunConfig(
        model=ModelConfig(d_model=16, n_heads=2, n_layers=3, position="hwfa"),
        data=DataConfig(source="topics", context=8, batch=2),
        device="cpu",
    )
    model = RunState(config).model
    assert [block.attention.spec.position.reach for block in model.blocks] == [3, 3, None]  # type: ignore[union-attr]
