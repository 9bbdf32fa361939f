"""Statistics split by token classes: those of whole matrices on models of transformers; what is recorded; bad input."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from tests.contract.watch.families import (
    SIZES,
    bert,
    deepseek,
    gpt2,
    ids,
    llama,
    noise,
    qwen3,
)
from tests.contract.watch.small import batch, small

from qkeel import load, watch
from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelWarning
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import LogitStats
from qkeel.monitor import Classes, RunDirectorySink
from qkeel.report import write

IMAGE = {"text": range(32), "image": range(32, 64)}
SDPA = nn.functional.scaled_dot_product_attention


def llava() -> nn.Module:
    """A vision–language model: an image encoder, whose patches take the place of the image tokens of a Llama."""
    text = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=63
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_batch() -> dict[str, Any]:
    """Two sequences, the second padded in front: some text, four image patches, some text."""
    tokens = ids(0, rows=2, t=12) % 60
    tokens[:, 4:8] = 63
    tokens[1, :2] = 0
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": noise(1, 2, 3, 8, 8).double(),
    }


def padded() -> dict[str, Any]:
    tokens = ids(0, rows=2, t=12)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def matrices(model: nn.Module, given: dict[str, Any]) -> list[dict[str, Any]]:
    """q, k [b h t d] and who sees whom of every attention of torch's function in a pass, in the order of the calls."""
    calls: list[dict[str, Any]] = []

    def listening(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **rest: Any
    ) -> Tensor:
        t, s = q.shape[-2], k.shape[-2]
        visible = torch.ones(len(q), 1, t, s, dtype=torch.bool)
        if rest.get("is_causal"):
            visible = visible.tril()
        if attn_mask is not None:
            visible = visible & (
                attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e30
            )
        scale = rest.get("scale") or q.shape[-1] ** -0.5
        calls.append({"q": q, "k": k, "visible": visible, "scale": scale})
        return SDPA(q, k, v, attn_mask=attn_mask, **rest)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "scaled_dot_product_attention", listening)
        model(**given)
    return calls


def split(call: dict[str, Any], classes: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """max_logit, mass [h a b], query_norm [h a], key_norm [g a] from whole matrices."""
    q, k, groups = call["q"], call["k"], call["k"].shape[1]
    each = k.repeat_interleave(q.shape[1] // groups, dim=1)
    visible = (call["visible"] & counted[:, None, :, None]).expand(*q.shape[:3], -1)
    z = (call["scale"] * q @ each.mT).masked_fill(~visible, -torch.inf)
    p = z.softmax(-1).nan_to_num()
    of_key = nn.functional.one_hot(classes, 2).bool()[:, None]  # [b 1 s c]
    of_query = of_key[:, :, -q.shape[2] :]
    rows = visible.any(-1, keepdim=True) & of_query
    keys = visible.unflatten(1, (groups, -1)).any(2).any(2)[..., None] & of_key
    pairs = (
        visible[..., None, None]
        & of_query[:, :, :, None, :, None]
        & of_key[:, :, None, :, None, :]
    )
    mass = torch.einsum("bhta,bhts,bisc->hac", rows.double(), p, of_key.double())
    found = {
        "max_logit": z[..., None, None].masked_fill(~pairs, -torch.inf).amax((0, 2, 3)),
        "mass": mass / rows.sum((0, 2))[..., None],
    }
    for name, x, of in (("query_norm", q, rows), ("key_norm", k, keys)):
        found[name] = (x.norm(dim=-1)[..., None] * of).sum((0, 2)) / of.sum((0, 2))
    return found


def assert_split(stats: LogitStats, expected: dict[str, Tensor]) -> None:
    assert stats.classes is not None
    for name, value in expected.items():
        if name == "key_norm":
            value = value[
                :: len(value) // len(stats.key_norm)
            ]  # transformers may repeat keys for their groups
        torch.testing.assert_close(
            getattr(stats.classes, name), value, rtol=1e-10, atol=1e-10, msg=name
        )


MODELS = {
    "llama, grouped keys": (llama, padded),
    "qwen3, q/k norm": (qwen3, padded),
    "gpt2": (gpt2, padded),
    "bert, both directions": (bert, padded),
    "deepseek, latent keys": (deepseek, padded),
    "llava, images": (llava, llava_batch),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_split_by_class_is_what_whole_matrices_in_float64_say(
    name: str,
) -> None:
    build, make = MODELS[name]
    torch.manual_seed(0)
    model, given = build().eval().double(), make()
    classes = (given["input_ids"] >= 32).long()
    counted = given["attention_mask"] > 0
    expected = [
        split(c, classes, counted)
        for c in matrices(model, given)
        if c["k"].shape[2] == classes.shape[1]
    ]
    assert len(expected) == 2
    with (
        watch(model, query_mask="attention_mask", classes=IMAGE) as monitor,
        torch.no_grad(),
    ):
        model(**given)
        found = [s for s in monitor.read().values() if s.classes is not None]
    for stats, truth in zip(found, expected, strict=True):
        assert_split(stats, truth)


def test_hand_written_attention_is_split_by_the_weights_it_gives() -> None:
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval().double()
    tokens = ids(3, rows=2, t=10)
    with (
        watch(
            model, classes=lambda input_ids, **_: (input_ids >= 32).long()
        ) as monitor,
        torch.no_grad(),
    ):
        weights = model(input_ids=tokens, output_attentions=True).attentions
        stats = list(monitor.read().values())
    one = nn.functional.one_hot((tokens >= 32).long(), 2).double()
    for s, p in zip(stats, weights, strict=True):
        assert s.classes is not None
        mass = torch.einsum("bta,bhts,bsc->hac", one, p, one) / one.sum((0, 1))[:, None]
        torch.testing.assert_close(
            s.classes.mass, mass, rtol=1e-6, atol=1e-6
        )  # its softmax is in float32


def test_with_a_cache_the_classes_are_those_of_the_whole_sequence() -> None:
    torch.manual_seed(0)
    model = llama().eval().double()
    tokens = ids(4, rows=2, t=12)
    of_all = (tokens >= 32).long()
    with (
        watch(model, classes=lambda **given: of_all[:, : given["upto"]]) as monitor,
        torch.no_grad(),
    ):
        monitor_on = model.forward

        def forward(upto: int, **rest: Any) -> Any:
            return monitor_on(**rest)

        model.forward = forward  # type: ignore[method-assign]
        cache = model(input_ids=tokens[:, :7], use_cache=True, upto=7).past_key_values
        monitor.read()
        past = copy.deepcopy(cache)
        expected = matrices(
            model, {"input_ids": tokens[:, 7:], "past_key_values": past, "upto": 12}
        )
        monitor.read()
        model(input_ids=tokens[:, 7:], past_key_values=cache, upto=12)
        found = monitor.read()
    for stats, call in zip(found.values(), expected, strict=True):
        assert call["q"].shape[2] == 5
        assert call["k"].shape[2] == 12
        assert_split(stats, split(call, of_all, torch.ones(2, 5, dtype=torch.bool)))


def test_classes_are_told_by_ids_by_the_name_of_an_argument_by_a_function_or_by_a_tensor() -> (
    None
):
    model, tokens = bert().eval(), ids(5, rows=2, t=9)
    image = tokens >= 32
    reads: list[ClassStats] = []
    for given in (
        IMAGE,
        {"text": list(range(32)), "image": torch.arange(32, 64)},
        "token_type_ids",
        lambda input_ids, token_type_ids: token_type_ids == 1,
        image.long(),
        Classes(image, names=("text", "image")),
    ):
        with watch(model, classes=given) as monitor:
            model(input_ids=tokens, token_type_ids=image.long())
            stats = next(iter(monitor.read().values()))
            assert stats.classes is not None
            reads.append(stats.classes)
    assert [r.names for r in reads] == [("text", "image")] * 2 + [("0", "1")] * 3 + [
        ("text", "image")
    ]
    for other in reads[1:]:
        assert torch.equal(other.mass, reads[0].mass)
        assert torch.equal(other.max_logit, reads[0].max_logit)


def test_the_split_is_recorded_by_head_folded_by_layer_and_stands_in_the_table(
    tmp_path: Path,
) -> None:
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sink = RunDirectorySink(tmp_path / "run")
    with watch(model, optimizer, classes=IMAGE, sinks=sink) as monitor:
        for step in range(3):
            model(input_ids=ids(step), labels=ids(step)).loss.backward()
            stats = next(iter(monitor.read().values())).classes
            optimizer.step()
            optimizer.zero_grad()
        sample = monitor.sample
        table = monitor.table()
    assert sample is not None
    assert stats is not None
    run = load(tmp_path / "run")
    assert run.config["classes"] == ["text", "image"]
    heads = run.history.heads
    assert heads["class_mass/image->text"].shape == (3, 2, 4)
    np.testing.assert_allclose(
        heads["class_mass/image->text"][-1, 0], stats.pair("mass", "image", "text")
    )
    np.testing.assert_allclose(
        heads["query_competition"][-1, 0], stats.query_competition, rtol=1e-6
    )
    keys = stats.key_norm[:, 1].repeat_interleave(2)
    np.testing.assert_allclose(heads["class_key_norm/image"][-1, 0], keys, rtol=1e-6)
    assert "|q| by class" in table
    assert sample.by_layer("class_max_logit/text->text").shape == (2,)
    page = tmp_path / "report.html"
    write([tmp_path / "run"], page)
    text = page.read_text(encoding="utf-8")
    assert '"class_mass/image->text"' in text
    assert not [e for e in run.events if "not announced" in str(e.get("event"))]


def test_a_class_that_does_not_occur_is_told_once_and_its_numbers_are_missing() -> None:
    model = llama().eval()
    with watch(model, classes=IMAGE) as monitor:
        with pytest.warns(
            QkeelWarning, match="no token of the class 'image' in this pass"
        ):
            model(input_ids=ids(0) % 32)
        model(input_ids=ids(1) % 32)
        found = next(iter(monitor.read().values())).classes
        sample = monitor.sample
    assert found is not None
    assert found.n_queries[:, 1].eq(0).all()
    assert sample is not None
    assert np.isnan(sample.heads["class_mass/image->text"]).all()
    assert np.isnan(sample.heads["query_competition"]).all()


def test_ids_of_no_class_switch_the_monitor_off_with_one_clear_warning() -> None:
    model = llama().eval()
    with watch(model, classes={"text": range(3, 32), "image": range(32, 60)}):
        tokens = ids(0) % 50 + 3
        tokens[0, 0] = 61
        with pytest.warns(
            QkeelWarning,
            match=r"expected every token id to be in a class, got .* in none \(ids 61",
        ):
            model(input_ids=tokens)
        assert torch.isfinite(model(input_ids=tokens).logits).all()


def test_classes_of_another_length_split_nothing_and_say_so() -> None:
    model = llama().eval()
    with watch(model, classes=torch.zeros(2, 5, dtype=torch.long)) as monitor:
        with pytest.warns(
            QkeelWarning,
            match=r"expected classes of shape \[batch tokens\] = \[2 8\].* got \[2, 5\]",
        ):
            model(input_ids=ids(0))
        assert next(iter(monitor.read().values())).classes is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, InvalidTypeError, "expected classes as a dict"),
        ("modality", InvalidValueError, "name an argument of the model's forward"),
        ({"text": range(9)}, InvalidValueError, "at least two classes"),
        (
            {"text": range(9), "image": range(8, 12)},
            InvalidValueError,
            "got 8 in both 'text' and 'image'",
        ),
        (
            {"text": range(9), "image": []},
            InvalidValueError,
            "token ids of class 'image'",
        ),
        ({"text": "abc", "image": [1]}, InvalidValueError, "token ids of class 'text'"),
        ({"a/b": [0], "image": [1]}, InvalidValueError, "without / or >"),
        (torch.zeros(2, 3), InvalidTypeError, "whole numbers, got torch.float32"),
        (
            torch.zeros(2, 3, 4, dtype=torch.long),
            InvalidValueError,
            r"shape \[batch tokens\], got \(2, 3, 4\)",
        ),
        (
            torch.tensor([0, -2]),
            InvalidValueError,
            "or -1 for a token without a class, got -2 to 0",
        ),
        (Classes(torch.tensor([0, 1]), names=("a", "b")).source + 1, None, ""),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    given: Any, error: type[Exception] | None, message: str
) -> None:
    model = small()
    if error is None:
        with pytest.raises(InvalidValueError, match="expected classes from 0 to 1"):
            watch(model, classes=Classes(given, names=("a", "b")))
        return
    with pytest.raises(error, match=message):
        watch(model, classes=given)


def test_classes_without_ids_to_tell_them_from_are_refused_in_the_first_pass() -> None:
    model = small()
    with (
        watch(model, classes=IMAGE),
        pytest.warns(QkeelWarning, match="got none; pass classes as the name"),
    ):
        model(batch(0))


def test_classes_can_be_frozen_with_their_names() -> None:
    assert dataclasses.replace(Classes(IMAGE)).names == ("text", "image")
