"""The second language, the encoder–decoder that learns it, and remedies on its self- and cross-attention."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from qkeel.handle import under
from qkeel.lab import run
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import with_values
from qkeel.lab.second_language import CLAUSE, WORD, translated
from qkeel.lab.studies import TRANSLATION_BASE
from qkeel.lab.tasks import BEGIN_TRANSLATION
from qkeel.lab.text import load
from qkeel.lab.train import evaluate, train_step

VOWELS = b"aeiouAEIOU"
TINY = with_values(
    TRANSLATION_BASE,
    model={"d_model": 16, "n_heads": 2},
    data={"context": 12, "batch": 4, "pairs": 50},
    steps=3,
    log_every=1,
    eval_sequences=8,
    probe_sequences=2,
    device="cpu",
)


def test_a_translation_has_the_words_of_each_clause_backwards_in_other_letters():
    assert translated(b"a big, old: \xe9 x1") == b"coh e, umf: \xe9 y1"
    text = load(TINY.data).train[:20_000].tobytes()
    second = translated(text)
    assert CLAUSE.sub(b"", second) == CLAUSE.sub(b"", text)
    for clause, other in zip(CLAUSE.findall(text), CLAUSE.findall(second), strict=True):
        assert len(clause) == len(other)
        words, others = WORD.findall(clause), WORD.findall(other)[::-1]
        for a, b in zip(b"".join(words), b"".join(others), strict=True):
            assert (a in VOWELS) == (b in VOWELS)
            assert a != b


def test_pairs_are_few_fixed_and_of_their_own_part_of_the_text():
    state, text = RunState(resolve(TINY)), load(TINY.data)
    first = state.task.batch(3, 5)
    assert torch.equal(first.inputs, state.task.batch(3, 5).inputs)
    assert (first.inputs.shape, first.targets.shape) == ((4, 24), (4, 12))
    batches = [state.task.batch(0, step).inputs for step in range(200)]
    sources = {bytes(row) for x in batches for row in x[:, :12].tolist()}
    # Two places of a text may begin alike: it is that of the installed Python.
    assert 45 <= len(sources) <= 50
    assert all(source in text.train.tobytes() for source in sources)
    held = state.heldout
    assert bytes(held.inputs[0, :12].tolist()) in text.heldout.tobytes()
    for inputs, targets in zip(held.inputs.tolist(), held.targets.tolist()):
        assert translated(bytes(inputs[:12])) == bytes(targets)
        assert inputs[12:] == [BEGIN_TRANSLATION, *targets[:-1]]
    others = RunState(resolve(with_values(TINY, data={"pairs": 49})))
    assert others.task.corpus.sha256 != state.task.corpus.sha256


def test_bleu_compares_greedy_translations_with_the_true_ones(tmp_path, monkeypatch):
    calls = []

    def corpus_bleu(texts, references):
        calls.append((texts, *references))
        return SimpleNamespace(score=12.5)

    sacrebleu = SimpleNamespace(corpus_bleu=corpus_bleu)
    monkeypatch.setitem(sys.modules, "sacrebleu", sacrebleu)
    place = run(TINY, tmp_path / "a")
    assert place.summary()["val_bleu"] == 12.5
    assert place.heads().values["max_logit"].shape == (4, 6, 2)
    ((translations, references),) = calls  # once, after training
    state = RunState(resolve(TINY))
    targets = state.heldout.targets.tolist()
    assert references == [bytes(row).decode("latin-1") for row in targets]
    weights = under("model.", safetensors.torch.load_file(place.checkpoint))
    state.model.load_state_dict(weights)
    state.model.eval()
    sources = state.heldout.inputs[:, :13]
    for source, translation in zip(sources, translations, strict=True):
        predicted = torch.tensor(list(translation.encode("latin-1")))
        logits = state.model(torch.cat([source, predicted[:-1]])[None])
        assert torch.equal(logits[0, :, :256].argmax(-1), predicted)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert state.task.decoded(state.model, state.heldout) == {}


@pytest.mark.slow
def test_a_few_hundred_steps_teach_the_second_language_and_only_with_the_source():
    config = with_values(
        TRANSLATION_BASE, device="cpu", steps=500, data={"pairs": 4000}
    )
    state, length = RunState(resolve(config)), config.data.context
    for step in range(500):
        train_step(state, step)
    loss = evaluate(state)["val_loss"]
    rolled = state.heldout.inputs.clone()
    rolled[:, :length] = rolled[:, :length].roll(1, 0)
    state.heldout = dataclasses.replace(state.heldout, inputs=rolled)
    assert loss < 1.4
    assert evaluate(state)["val_loss"] > loss + 0.5, "another source does not help"
