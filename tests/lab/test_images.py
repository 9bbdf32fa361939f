"""Images: those that are shipped or given, how they enter a sequence with text, and what is learned from them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from qkeel.errors import QkeelError
from qkeel.lab import Grid, Watcher, make_plan, run, run_plan
from qkeel.lab.config import with_values
from qkeel.lab.images import WORDS, load_digits
from qkeel.lab.studies import MIXES, mixed
from qkeel.lab.tasks import (
    BEGIN,
    CAPTION,
    IMAGE,
    NEAR_IMAGE,
    TEXT,
    FusedTask,
    VisionTask,
)
from qkeel.lab.text import batch, load


def test_the_digits_are_the_1797_of_the_set_a_tenth_of_each_held_out():
    digits = load_digits()
    shares = [digits.held[digits.labels == label].mean() for label in range(10)]
    assert 0.09 < min(shares) <= max(shares) < 0.12
    sides = [{x.tobytes() for x in digits.pixels[digits.held == s]} for s in (0, 1)]
    assert not sides[0] & sides[1]
    # Runs of earlier versions are named and compared by it.
    assert digits.sha256.startswith("61fbc901b733")


# Images and text in one sequence.


@pytest.fixture(scope="module")
def fused(tiny):
    """A run on images and text; keywords are fields of the images."""
    data = {"task": "multimodal", "context": 96, "batch": 4}
    return lambda **images: tiny(
        data=data, images=images, steps=4, eval_sequences=8, probe_sequences=8
    )


def test_a_batch_is_a_function_of_seed_and_step_with_targets_and_their_kinds(
    fused,
):
    task = FusedTask(fused(image_share=1.0))
    first = task.batch(3, 5)
    assert torch.equal(first.inputs, task.batch(3, 5).inputs)
    assert not torch.equal(first.inputs, task.batch(4, 5).inputs)
    assert first.inputs.shape == first.targets.shape == (4, 96)
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    assert torch.equal(first.kinds == IMAGE, first.targets >= BEGIN)
    assert {CAPTION, NEAR_IMAGE} <= set(first.kinds.unique().tolist())
    text = fused(image_share=0.0)
    alone = FusedTask(text).batch(1, 2)
    windows = batch(load(text.data), text.data, 1, 2)
    assert np.array_equal(alone.inputs.numpy(), windows[:, :-1])
    assert set(alone.kinds.unique().tolist()) == {TEXT}


def test_an_image_stands_before_its_caption_or_after(fused):
    task = FusedTask(fused(image_share=1.0, canvas=1))
    words = tuple(f"{word}\n" for word in WORDS)
    starts = []
    for step in range(8):
        for row in task.batch(0, step).inputs.tolist():
            start = row.index(BEGIN)
            assert all(token > BEGIN for token in row[start + 1 : start + 17])
            assert row[start + 17] < BEGIN
            text = bytes(t for t in row if t < BEGIN).decode(errors="replace")
            assert text.startswith(words)
            assert start in (0, text.index("\n") + 1)
            starts.append(start)
    assert 8 < starts.count(0) < 24


def test_the_share_of_sequences_with_an_image_is_as_asked(fused):
    task = FusedTask(fused(image_share=0.4))
    counts = [
        int((task.batch(0, step).inputs == BEGIN).any(1).sum()) for step in range(200)
    ]
    assert np.mean(counts) == pytest.approx(1.6, abs=0.1)


def test_a_code_says_what_its_patch_looks_like(fused):
    task = FusedTask(fused(levels=17, patch=1, canvas=1))
    digits = load_digits()
    assert np.array_equal(task.codes, (digits.pixels * 16).round().astype(int))
    assert task.corpus.vocab_size == BEGIN + 1 + 17
    task = FusedTask(fused(canvas=1, image_input="patches"))
    assert task.corpus.vocab_size == BEGIN + 1 + 4**4
    pixels = task.build(torch.Generator().manual_seed(0)).get_buffer("embedding.pixels")
    assert pixels.shape == (256, 4)
    trained = pixels[task.codes[~digits.held].ravel()]
    assert abs(float(trained.mean())) < 1e-5
    assert float(trained.std()) == pytest.approx(1.0, abs=1e-4)


def test_held_out_images_are_never_trained_on_and_the_probe_is_the_same_for_every_mix(
    fused,
):
    task = FusedTask(fused())
    assert not set(task.train) & set(task.held)
    assert load_digits().held[task.held].all()
    probes = [FusedTask(mixed(fused(), name)).heldout(8) for name in MIXES]
    assert all(torch.equal(probe.inputs, probes[0].inputs) for probe in probes)
    assert int((probes[0].inputs == BEGIN).any(1).sum()) == 4


@pytest.mark.parametrize("way", ["codes", "patches"])
def test_image_embeddings_start_with_the_variance_asked_for(fused, way):
    """So do queries: E‖q‖² = σ² ‖W_q‖_F², but for a norm before them."""
    config = with_values(
        fused(image_input=way, image_variance=16.0), model={"d_model": 64}
    )
    task = FusedTask(config)
    model = task.build(torch.Generator().manual_seed(0))
    images = torch.from_numpy(task.codes[task.train].ravel()) + BEGIN + 1
    block = model.get_submodule("blocks.0")
    project = block.get_submodule("attention.q_proj")
    with torch.no_grad():
        inputs = [
            model.get_submodule("embedding")(tokens[None])
            for tokens in (images, torch.arange(256))
        ]
        normed = [block.get_submodule("attention_norm")(x) for x in inputs]
        queries = [float(project(x).square().mean()) for x in (*inputs, *normed)]
    variances = [float(x.square().mean()) for x in inputs]
    assert variances == pytest.approx([16.0, 1.0], rel=0.15)
    assert queries[0] / queries[1] == pytest.approx(16.0, rel=0.25)
    assert queries[2] / queries[3] == pytest.approx(1.0, rel=0.25)


def test_a_run_records_losses_norms_logits_and_weights_by_modality(fused, tmp_path):
    place = run(fused(), tmp_path / "r")
    first, last = place.metrics()[0], place.metrics()[-1]
    names = ("query_norm/image", "key_norm/text", "last_block_norm/image")
    assert all(math.isfinite(last[name]) for name in names)
    pairs = [(a, b) for a in ("text", "image") for b in ("text", "image")]
    masses = [first[f"attention_mass/{a}>{b}"] for a, b in pairs]
    assert (masses[0] + masses[1], masses[2] + masses[3]) == pytest.approx((1.0, 1.0))
    logits = [first[f"max_logit/{a}>{b}"] for a, b in pairs]
    assert max(logits) == pytest.approx(first["max_logit"])
    losses = [first[f"val_loss/{kind}"] for kind in FusedTask.kinds]
    assert min(losses) < first["val_loss"] < max(losses)
    assert place.summary()["query_norm/image"] == last["query_norm/image"]
    # val_loss is over what training holds.
    last = run(mixed(fused(), "text"), tmp_path / "text").metrics()[-1]
    assert last["val_loss"] == last["val_loss/text"]


def test_dropout_is_a_function_of_seed_and_step_so_a_stopped_run_goes_on_to_the_same_bits(
    fused, tmp_path
):
    config = dataclasses.replace(fused(), remedy="dropout:rate=0.5")
    whole = run(config, tmp_path / "whole").metrics()[-1]
    answers = iter([False, False, True])
    watcher = Watcher(should_stop=lambda: next(answers))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut", watcher=watcher)
    cut = run(config, tmp_path / "cut").metrics()[-1]
    plain = run(fused(), tmp_path / "plain").metrics()[-1]
    assert cut["val_loss"] == whole["val_loss"]
    assert plain["train_loss"] != whole["train_loss"]


def test_the_study_has_a_part_for_each_mix_and_its_table_the_modalities(
    fused, tmp_path
):
    mixes = ["text", "patches:norm=none"]
    grid = Grid(remedies=["none"], lrs=[0.01], seeds=[0], mixes=mixes)
    plan = make_plan("multimodal", fused(), grid)
    assert [r.role for r in plan.runs] == mixes
    assert [r.config.model.norm_order for r in plan.runs] == ["pre", "none"]
    table = run_plan(plan, tmp_path / "s").table
    assert [row["mix"] for row in table] == mixes
    assert all(math.isfinite(row["query_norm/image"]) for row in table)
    head = (tmp_path / "s" / "table.csv").read_text().splitlines()[0]
    assert "val_loss/image" in head


# Classes of images.


@pytest.fixture
def vision(tiny):
    def make(**fields):
        model = {"d_model": 32, "n_layers": 1, "attention": "vit"}
        data = {"task": "vision", "batch": 32, "context": 16}
        sizes = {"steps": 60, "log_every": 20, "eval_sequences": 256, **fields}
        return tiny(model=model, data=data, optim={"lr": 0.01}, **sizes)

    return make


def test_training_images_are_a_function_of_seed_and_step_and_never_held_out(
    vision,
):
    task = VisionTask(vision())
    assert torch.equal(task.batch(0, 1).inputs, task.batch(0, 1).inputs)
    assert task.batch(0, 1).inputs.shape == (32, 16, 4)
    held = {image.numpy().tobytes() for image in task.heldout(1000).inputs}
    batches = [task.batch(0, step).inputs for step in range(20)]
    assert not held & {image.numpy().tobytes() for x in batches for image in x}
    assert set(task.heldout(64).targets.tolist()) == set(range(10))


def test_a_small_vit_learns_the_digits(vision, tmp_path):
    place = run(vision(), tmp_path / "r")
    first, last = place.metrics()[0], place.metrics()[-1]
    assert first["val_accuracy"] < 0.3
    assert last["val_accuracy"] > 0.7
    assert place.summary()["val_accuracy"] == last["val_accuracy"]
    assert place.env()["corpus"]["loss_unit"] == "image"
    assert last["tokens"] == 60 * 32 * 16


def test_what_does_not_fit_is_refused_with_the_reason(fused, tmp_path):
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    tokens = {"source": str(tmp_path / "a.bin")}
    for make, words in (
        (
            lambda: FusedTask(with_values(fused(), data={"context": 87})),
            "needs 65 tokens and the longest caption 24; expected a context of at least 88",
        ),
        (lambda: FusedTask(with_values(fused(), data=tokens)), "contains tokens"),
        (lambda: FusedTask(fused(levels=17)), "4 pixels make 83,521 codes"),
        (lambda: mixed(fused(), "mixx"), "unknown data mix"),
        (lambda: mixed(fused(), "mix:size=3"), "unknown option of mix"),
    ):
        with pytest.raises(QkeelError, match=words):
            make()
