"""The second language, the encoder–decoder that learns it, and remedies on its self- and cross-attention."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from qkeel.errors import InvalidValueError
from qkeel.lab import DataConfig, ModelConfig, run
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.second_language import CLAUSE, WORD, translated
from qkeel.lab.studies import TRANSLATION_BASE
from qkeel.lab.tasks import BEGIN_TRANSLATION
from qkeel.lab.text import load
from qkeel.lab.train import evaluate, train_step
from qkeel.nn import Decoder, DecoderConfig, EncoderDecoder

VOWELS = b"aeiouAEIOU"
TINY = dataclasses.replace(
    TRANSLATION_BASE,
    model=ModelConfig(d_model=16, n_heads=2, n_layers=2),
    data=DataConfig(source="topics", task="translation", context=12, batch=4, pairs=50),
    steps=3,
    log_every=1,
    eval_sequences=8,
    probe_sequences=2,
    device="cpu",
)


def test_a_translation_has_the_words_of_each_clause_backwards_in_other_letters() -> (
    None
):
    text = load(DataConfig(source="topics")).train[:20_000].tobytes()
    second = translated(text)
    assert len(second) == len(text)
    assert CLAUSE.sub(b"", second) == CLAUSE.sub(b"", text)
    exchanged = 0
    for clause, other in zip(CLAUSE.findall(text), CLAUSE.findall(second), strict=True):
        words, others = WORD.findall(clause), WORD.findall(other)[::-1]
        for word, new in zip(words, others, strict=True):
            assert [c in VOWELS for c in word] == [c in VOWELS for c in new]
            exchanged += all(a != b for a, b in zip(word, new, strict=True))
        assert WORD.split(clause)[0] == WORD.split(other)[0]
    assert exchanged == len(WORD.findall(text))
    assert translated(b"a big, old: \xe9 x1") == b"coh e, umf: \xe9 y1"


def test_pairs_are_few_fixed_and_of_their_own_part_of_the_text() -> None:
    state = RunState(resolve(TINY))
    first, again = state.task.batch(3, 5), state.task.batch(3, 5)
    assert torch.equal(first.inputs, again.inputs)
    assert first.inputs.shape == (4, 24)
    assert first.targets.shape == (4, 12)
    seen = {
        bytes(row[:12].tolist())
        for step in range(200)
        for row in state.task.batch(0, step).inputs
    }
    assert (
        45 <= len(seen) <= 50
    )  # two places of a text may begin alike: it is that of the installed Python
    for inputs, targets in zip(state.heldout.inputs, state.heldout.targets):
        assert translated(bytes(inputs[:12].tolist())) == bytes(targets.tolist())
        assert (int(inputs[12]), inputs[13:].tolist()) == (
            BEGIN_TRANSLATION,
            targets[:-1].tolist(),
        )
    text = load(TINY.data)
    assert all(row in text.train.tobytes() for row in seen)
    assert bytes(state.heldout.inputs[0, :12].tolist()) in text.heldout.tobytes()
    others = dataclasses.replace(TINY, data=dataclasses.replace(TINY.data, pairs=49))
    assert RunState(resolve(others)).task.corpus.sha256 != state.task.corpus.sha256


def test_the_model_predicts_from_the_whole_source_and_the_target_before() -> None:
    model = EncoderDecoder(
        DecoderConfig(vocab_size=11, d_model=16, n_heads=2, base_width=8), source=4
    ).eval()
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.arange(9)[None]
    base = model(tokens)
    for place in range(9):
        changed = tokens.clone()
        changed[0, place] = 10
        moved = (model(changed) - base).abs().amax(-1)[0] > 1e-6
        assert moved.tolist() == [place < 4 or i >= place - 4 for i in range(5)]
    with pytest.raises(InvalidValueError, match="mha"):
        EncoderDecoder(DecoderConfig(vocab_size=11, attention="mla"), source=4)
    with pytest.raises(InvalidValueError, match="context"):
        model.blocks[0](torch.zeros(1, 2, 16))
    with pytest.raises(InvalidValueError, match="context"):
        Decoder(DecoderConfig(vocab_size=11)).blocks[0](
            torch.zeros(1, 2, 64), context=torch.zeros(1, 2, 64)
        )


def test_a_run_names_its_attentions_and_the_source_is_what_it_learns_from(
    tmp_path: Path,
) -> None:
    place = run(TINY, tmp_path / "a")
    heads = place.heads()
    assert heads.values["max_logit"].shape == (4, 6, 2)
    assert place.env()["corpus"]["vocab_size"] == 257
    plain = dataclasses.replace(TINY, data=dataclasses.replace(TINY.data, task="text"))
    assert "pairs" not in plain.identity()["data"]
    assert TINY.identity()["data"]["pairs"] == 50


def test_bleu_compares_greedy_translations_with_the_true_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def corpus_bleu(
        translations: list[str], references: list[list[str]]
    ) -> SimpleNamespace:
        calls.append((translations, *references))
        return SimpleNamespace(score=12.5)

    monkeypatch.setitem(
        sys.modules, "sacrebleu", SimpleNamespace(corpus_bleu=corpus_bleu)
    )
    trained = run(TINY, tmp_path / "a")
    assert trained.summary()["val_bleu"] == 12.5
    ((translations, references),) = calls  # once, after training
    state = RunState(resolve(TINY))
    assert references == [
        bytes(row).decode("latin-1") for row in state.heldout.targets.tolist()
    ]
    state.model.load_state_dict(load_file(trained.checkpoint, "model."))
    state.model.eval()
    for source, translation in zip(
        state.heldout.inputs[:, :13], translations, strict=True
    ):
        predicted = torch.tensor(list(translation.encode("latin-1")))
        logits = state.model(torch.cat([source, predicted[:-1]])[None])
        assert torch.equal(logits[0, :, :256].argmax(-1), predicted)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert state.task.decoded(state.model, state.heldout) == {}


def load_file(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    tensors = safetensors.torch.load_file(path)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.slow
def test_a_few_hundred_steps_teach_the_second_language_and_only_with_the_source() -> (
    None
):
    config = dataclasses.replace(
        TRANSLATION_BASE,
        device="cpu",
        steps=500,
        data=dataclasses.replace(TRANSLATION_BASE.data, pairs=4000),
    )
    state = RunState(resolve(config))
    for step in range(500):
        train_step(state, step)
    score = evaluate(state)
    length = config.data.context
    rolled = state.heldout.inputs.clone()
    rolled[:, :length] = rolled[:, :length].roll(1, 0)
    state.heldout = dataclasses.replace(state.heldout, inputs=rolled)
    without = evaluate(state)
    assert score["val_loss"] < 1.4
    assert without["val_loss"] > score["val_loss"] + 0.5, (
        "the source of another text does not help"
    )
