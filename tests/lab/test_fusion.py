"""Images and text in one sequence: what a batch holds, what is held out, how images enter, and the study of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qkeel.errors import DataError, InvalidValueError, UnknownNameError
from qkeel.lab import Execution, Grid, RunConfig, make_plan, run, run_plan
from qkeel.lab.config import (
    DataConfig,
    ImagesConfig,
    ModelConfig,
    OptimConfig,
    with_values,
)
from qkeel.lab.images import load_pictures
from qkeel.lab.studies import MIXES, mixed
from qkeel.lab.tasks import BEGIN, CAPTION, IMAGE, NEAR_IMAGE, TEXT, FusedTask
from qkeel.lab.text import batch, load
from qkeel.nn import FusedEmbedding

TINY = RunConfig(
    model=ModelConfig(d_model=16, n_layers=2, n_heads=2),
    data=DataConfig(source="topics", task="multimodal", context=96, batch=4),
    optim=OptimConfig(lr=0.1),
    steps=4,
    log_every=2,
    checkpoint_every=2,
    eval_sequences=8,
    probe_sequences=8,
    device="cpu",
)


def task(**images: object) -> FusedTask:
    return FusedTask(dataclasses.replace(TINY, images=ImagesConfig(**images)))  # type: ignore[arg-type]


def test_batches_are_a_function_of_seed_and_step() -> None:
    one = task()
    first = one.batch(3, 5)
    one.batch(3, 6)
    again = one.batch(3, 5)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, one.batch(4, 5).inputs)
    assert first.inputs.shape == first.targets.shape == (4, 96)


def test_without_images_the_batches_are_those_of_text() -> None:
    windows = batch(load(TINY.data), TINY.data, 1, 2)
    examples = task(image_share=0.0).batch(1, 2)
    assert np.array_equal(examples.inputs.numpy(), windows[:, :-1])
    assert set(examples.kinds.unique().tolist()) == {TEXT}  # type: ignore[union-attr]


def test_targets_are_the_next_tokens_and_kinds_are_those_of_the_targets() -> None:
    examples = task(image_share=1.0).batch(0, 0)
    assert torch.equal(examples.inputs[:, 1:], examples.targets[:, :-1])
    kinds = examples.kinds
    assert kinds is not None
    assert torch.equal(kinds == IMAGE, examples.targets >= BEGIN)
    assert {CAPTION, NEAR_IMAGE} <= set(kinds.unique().tolist())


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_an_image_stands_before_its_caption_or_after(first: float) -> None:
    examples = task(image_share=1.0, image_first=first, canvas=1).batch(0, 0)
    words = [f"{word}\n" for word in load_pictures("digits", 8).classes]
    for row in examples.inputs.tolist():
        place = row.index(BEGIN)
        assert all(token > BEGIN for token in row[place + 1 : place + 17])
        assert row[place + 17] < BEGIN
        text = bytes(t for t in row if t < BEGIN).decode(errors="replace")
        assert any(text.startswith(word) for word in words)
        assert (place == 0) == (first == 1.0)


def test_the_share_of_sequences_with_an_image_is_as_asked() -> None:
    one = task(image_share=0.25)
    counts = [
        int((one.batch(0, step).inputs == BEGIN).any(1).sum()) for step in range(50)
    ]
    assert np.mean(counts) == 1.0
    some = task(image_share=0.4)
    counts = [
        int((some.batch(0, step).inputs == BEGIN).any(1).sum()) for step in range(200)
    ]
    assert np.mean(counts) == pytest.approx(1.6, abs=0.1)


def test_a_code_says_what_its_patch_looks_like() -> None:
    one = task(levels=17, patch=1, canvas=1)
    digits = load_pictures("digits", 8)
    assert np.array_equal(one.codes, (digits.pixels[..., 0] * 16).round().astype(int))
    model = task(canvas=1, image_input="patches").build(
        torch.Generator().manual_seed(0)
    )
    pixels = model.get_buffer("embedding.pixels")
    assert pixels.shape == (256, 4)
    codes = task(canvas=1).codes[~digits.held].ravel()
    seen = pixels[codes]
    assert abs(float(seen.mean())) < 1e-5
    assert float(seen.std()) == pytest.approx(1.0, abs=1e-4)
    assert codes.max() < 256


def test_held_out_images_are_never_trained_on_and_the_probe_is_the_same_for_every_mix() -> (
    None
):
    digits = load_pictures("digits", 8)
    one = task(image_share=1.0)
    assert not set(one.train) & set(one.held)
    assert digits.held[one.held].all()
    probes = [task(**MIXES[name]).heldout(8) for name in MIXES]
    assert all(torch.equal(probe.inputs, probes[0].inputs) for probe in probes)
    assert int((probes[0].inputs == BEGIN).any(1).sum()) == 4


@pytest.mark.parametrize("entering", ["codes", "patches"])
@pytest.mark.parametrize("variance", [1.0, 16.0])
def test_image_embeddings_start_with_the_variance_asked_for(
    entering: str, variance: float
) -> None:
    images = {"image_input": entering, "image_variance": variance}
    one = FusedTask(with_values(TINY, model={"d_model": 64}, images=images))
    model = one.build(torch.Generator().manual_seed(0))
    codes = torch.from_numpy(one.codes[one.train].ravel()) + BEGIN + 1
    with torch.no_grad():
        seen = model.get_submodule("embedding")(codes[None])
        text = model.get_submodule("embedding")(torch.arange(256)[None])
    assert float(seen.square().mean()) == pytest.approx(variance, rel=0.15)
    assert float(text.square().mean()) == pytest.approx(1.0, rel=0.05)


def test_a_query_norm_grows_with_the_deviation_of_the_input_and_not_behind_a_norm() -> (
    None
):
    """E‖q‖² = σ² ‖W_q‖_F²: image queries start with 16 times text's square norm; behind an RMS norm with the same."""
    model = (
        task(**MIXES["patches"], image_variance=16.0)
        .build(torch.Generator().manual_seed(0))
        .double()
    )
    one = task(**MIXES["patches"])
    images = torch.from_numpy(one.codes[one.train].ravel()) + BEGIN + 1
    text = torch.from_numpy(one.text.train.astype(np.int64))[: len(images)]
    embed, block = model.get_submodule("embedding"), model.get_submodule("blocks.0")
    project, norm = (
        block.get_submodule("attention.q_proj"),
        block.get_submodule("attention_norm"),
    )
    with torch.no_grad():
        raw = [
            project(embed(tokens)).square().sum(-1).mean() for tokens in (images, text)
        ]
        normed = [
            project(norm(embed(tokens))).square().sum(-1).mean()
            for tokens in (images, text)
        ]
    assert float(raw[0] / raw[1]) == pytest.approx(16.0, rel=0.25)
    assert float(normed[0] / normed[1]) == pytest.approx(1.0, rel=0.25)


def test_a_fused_embedding_maps_pixels_and_leaves_text_to_the_table() -> None:
    plain, pixels = torch.nn.Embedding(7, 5), torch.randn(3, 2)
    table, embedding = plain.weight, FusedEmbedding(plain, pixels)
    assert embedding.weight is table
    tokens = torch.tensor([[0, 3, 4, 6]])
    out = embedding(tokens)[0]
    assert torch.equal(out[:2], table[[0, 3]])
    assert torch.allclose(out[2:], pixels[[0, 2]] @ embedding.patch.weight.T)
    assert [name for name, _ in embedding.named_parameters()] == [
        "weight",
        "patch.weight",
    ]


def test_a_run_records_losses_norms_logits_and_weights_by_modality(
    tmp_path: Path,
) -> None:
    place = run(TINY, tmp_path / "r")
    first, last = place.metrics()[0], place.metrics()[-1]
    for name in (
        "query_norm/image",
        "key_norm/text",
        "max_logit/image>text",
        "last_block_norm/image",
    ):
        assert math.isfinite(last[name]), name
    for query in ("text", "image"):
        assert sum(
            first[f"attention_mass/{query}>{key}"] for key in ("text", "image")
        ) == pytest.approx(1.0, abs=1e-5)
    pairs = [
        first[f"max_logit/{a}>{b}"]
        for a in ("text", "image")
        for b in ("text", "image")
    ]
    assert max(pairs) == pytest.approx(first["max_logit"])
    kinds = [
        first[f"val_loss/{kind}"] for kind in ("text", "beside", "caption", "image")
    ]
    assert min(kinds) < first["val_loss"] < max(kinds)
    assert place.summary()["query_norm/image"] == last["query_norm/image"]


def test_val_loss_is_over_what_training_holds(tmp_path: Path) -> None:
    last = run(mixed(TINY, "text"), tmp_path / "r").metrics()[-1]
    assert last["val_loss"] == last["val_loss/text"]


def test_dropout_is_a_function_of_seed_and_step_so_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    config = dataclasses.replace(TINY, remedy="dropout:rate=0.5")
    whole = run(config, tmp_path / "whole").metrics()[-1]
    from qkeel.lab import Watcher

    answers = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        run(
            config, tmp_path / "cut", watcher=Watcher(should_stop=lambda: next(answers))
        )
    cut = run(config, tmp_path / "cut").metrics()[-1]
    plain = run(TINY, tmp_path / "plain").metrics()[-1]
    assert cut["val_loss"] == whole["val_loss"]
    assert plain["train_loss"] != whole["train_loss"]


def test_the_study_has_a_part_for_each_mix_and_its_table_the_modalities(
    tmp_path: Path,
) -> None:
    grid = Grid(
        remedies=["none"], lrs=[0.01], seeds=[0], mixes=["text", "patches:norm=none"]
    )
    plan = make_plan("multimodal", TINY, grid)
    assert [r.role for r in plan.runs] == ["text", "patches:norm=none"]
    assert [r.config.model.norm_order for r in plan.runs] == ["pre", "none"]
    table = run_plan(plan, tmp_path / "s", Execution()).table
    assert [row["mix"] for row in table] == ["text", "patches:norm=none"]
    assert all(math.isfinite(row["query_norm/image"]) for row in table)
    head = (tmp_path / "s" / "table.csv").read_text().splitlines()[0]
    assert "val_loss/image" in head
    assert head.startswith("remedy,lr,seed,steps,val_loss")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FusedTask(with_values(TINY, data={"context": 60})),
            "a canvas of 4 images needs 65 tokens",
        ),
        (lambda: task(levels=17), "17 levels for 4 pixels make 83,521 codes"),
        (lambda: mixed(TINY, "mixx"), "unknown data mix"),
        (lambda: mixed(TINY, "mix:size=3"), "unknown option of mix"),
        (lambda: ImagesConfig(image_share=1.5), "at most 1 for image_share"),
        (lambda: ImagesConfig(patch=3), "image_size to be a multiple of patch"),
        (lambda: ImagesConfig(image_variance=0.0), "above 0 for image_variance"),
        (lambda: ImagesConfig(levels=1), "of at least 2 for levels"),
        (lambda: ImagesConfig(images=""), "name or path of images"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises((InvalidValueError, UnknownNameError), match=message):
        make()


def test_text_of_tokens_cannot_be_used_with_captions(tmp_path: Path) -> None:
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="contains tokens"):
        FusedTask(with_values(TINY, data={"source": str(tmp_path / "a.bin")}))


def test_images_are_no_part_of_a_run_on_text() -> None:
    text = RunConfig()
    other = dataclasses.replace(text, images=ImagesConfig(canvas=2))
    assert text.run_id == other.run_id
    assert "task" not in text.identity()["data"], (
        "what was run before there were tasks is the same run"
    )
    assert (
        TINY.run_id != dataclasses.replace(TINY, images=ImagesConfig(canvas=2)).run_id
    )
