"""Images classified by a small vision transformer, in the frame of every other run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from qkeel.errors import DataError, ShapeError
from qkeel.lab import Execution, Grid, RunConfig, make_plan, run, run_plan
from qkeel.lab.build_run import resolve
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig
from qkeel.lab.tasks import VisionTask
from qkeel.nn import DecoderConfig, ViT

SMALL = RunConfig(
    model=ModelConfig(d_model=32, n_layers=1, n_heads=2, attention="vit"),
    data=DataConfig(task="vision", batch=32),
    optim=OptimConfig(lr=0.01),
    steps=60,
    log_every=20,
    device="cpu",
)


def test_batches_are_a_function_of_seed_and_step_from_the_training_images_alone() -> (
    None
):
    one = VisionTask(resolve(SMALL))
    first, again = one.batch(0, 1), one.batch(0, 1)
    assert torch.equal(first.inputs, again.inputs)
    assert first.inputs.shape == (32, 16, 4)
    held = {image.numpy().tobytes() for image in one.heldout(1000).inputs}
    assert not held & {
        image.numpy().tobytes()
        for step in range(20)
        for image in one.batch(0, step).inputs
    }
    assert set(one.heldout(64).targets.tolist()) == set(range(10))


def test_a_small_vit_learns_the_digits(tmp_path: Path) -> None:
    place = run(SMALL, tmp_path / "r")
    first, last = place.metrics()[0], place.metrics()[-1]
    assert first["val_accuracy"] < 0.3
    assert last["val_accuracy"] > 0.7
    assert place.summary()["val_accuracy"] == last["val_accuracy"]
    assert place.env()["corpus"]["loss_unit"] == "image"
    assert place.config()["data"]["context"] == 16
    assert last["tokens"] == 60 * 32 * 16


def test_attention_sees_the_whole_image() -> None:
    torch.manual_seed(0)
    model = VisionTask(resolve(SMALL)).build(torch.Generator().manual_seed(0))
    x = torch.randn(1, 16, 4)
    hidden: list[torch.Tensor] = []
    model.get_submodule("blocks.0").register_forward_hook(
        lambda _, __, out: hidden.append(out)
    )
    with torch.no_grad():
        model(x)
        x[0, -1] += 1.0
        model(x)
    assert not torch.equal(hidden[0][0, 0], hidden[1][0, 0]), (
        "the first patch does not see the last"
    )


def test_patches_of_another_shape_are_refused() -> None:
    model = ViT(DecoderConfig(vocab_size=3, d_model=8, n_heads=2), patches=4, width=2)
    assert model(torch.zeros(2, 4, 2)).shape == (2, 3)
    with pytest.raises(
        ShapeError, match=r"patches of shape \[batch 4 2\], got \(2, 5, 2\)"
    ):
        model(torch.zeros(2, 5, 2))


def test_a_study_of_rates_reports_accuracy(tmp_path: Path) -> None:
    grid = Grid(remedies=["none", "qk_norm"], lrs=[0.01], seeds=[0])
    base = dataclasses.replace(SMALL, steps=4, log_every=2, eval_sequences=32)
    result = run_plan(make_plan("lr", base, grid), tmp_path / "s", Execution())
    assert all(0 <= row["val_accuracy"] <= 1 for row in result.table)
    assert "val_accuracy" in (tmp_path / "s" / "table.csv").read_text().splitlines()[0]


def test_images_of_one_class_cannot_be_classified(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    for i in range(3):
        image.new("L", (8, 8), i).save(tmp_path / "cat" / f"{i}.png")
    config = dataclasses.replace(SMALL, images=ImagesConfig(images=str(tmp_path)))
    with pytest.raises(DataError, match="has 1 classes; vision expects at least 2"):
        VisionTask(resolve(config))
