"""Needles: what they are, where they are put, how many are found, and the attention that they get."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qkeel import reference
from qkeel.errors import InvalidValueError
from qkeel.lab import Execution, Grid, LongContexts, RunConfig, make_plan, run_plan
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.lengths import retrieved
from qkeel.lab.studies.grids import EXTRAPOLATION_BASE
from qkeel.lab.text import VALUES, Needles, ask, batch, insert_needles, load, long_texts
from qkeel.lab.training import TrainingBackend, train_step
from qkeel.nn.attention import SpecModule
from qkeel.spec import AttentionCall

Make = Callable[..., RunConfig]
NEEDLES = Needles(first=100, keys=4)
TEXT = np.full((40, 65), 97, dtype=np.int64)


def config(tiny: Make, **data: object) -> RunConfig:
    base = dataclasses.replace(tiny(), steps=2)
    return dataclasses.replace(base, data=dataclasses.replace(base.data, context=32, needle=0.5, **data))  # type: ignore[arg-type]


def test_every_token_of_needles_is_one_of_its_own_behind_the_text() -> None:
    tokens = [NEEDLES.needle(key, value) for key in range(4) for value in range(VALUES)]
    tokens += [NEEDLES.question(key) for key in range(4)] + [NEEDLES.value(value) for value in range(VALUES)]
    assert tokens == list(range(100, 144))
    assert NEEDLES.vocab_size == 144


def test_in_training_each_needle_is_in_the_text_once_and_its_questions_come_later_with_their_answers() -> None:
    changed = insert_needles(TEXT, NEEDLES, np.random.default_rng(0))
    for text in changed:
        assert (text != 97).sum() == 4 * (1 + 3 * 2)
        for key in range(4):
            (place,) = np.flatnonzero((text >= NEEDLES.needle(key, 0)) & (text <= NEEDLES.needle(key, VALUES - 1)))
            questions = np.flatnonzero(text == NEEDLES.question(key))
            assert len(questions) == 3
            assert (questions > place).all()
            assert (text[questions + 1] == NEEDLES.value(text[place] - NEEDLES.needle(key, 0))).all()
    assert (TEXT == 97).all()


def test_in_the_test_needles_are_spread_evenly_and_all_are_asked_for_at_the_end() -> None:
    asked = ask(TEXT, NEEDLES, np.random.default_rng(0))
    assert asked.places.tolist() == [7, 21, 35, 49]  # (i + 1/2) / 4 of the 57 tokens before the questions
    orders = set()
    for text, questions in zip(asked.windows, asked.questions, strict=True):
        assert sorted(questions) == [57, 59, 61, 63]
        keys, values = np.divmod(text[asked.places] - 100, VALUES)
        assert sorted(keys) == [0, 1, 2, 3]
        assert (text[questions] == NEEDLES.question(keys)).all()
        assert (text[questions + 1] == NEEDLES.value(values)).all()
        orders.add((*keys, *questions))
    assert len(orders) > 20  # neither the key nor the question tells the place


def test_values_are_even_so_that_a_guess_finds_one_in_eight() -> None:
    asked = ask(np.repeat(TEXT, 200, 0), NEEDLES, np.random.default_rng(1))
    keys, values = np.divmod(asked.windows[:, asked.places] - 100, VALUES)
    counts = np.zeros((4, VALUES))
    np.add.at(counts, (keys, values), 1)
    assert counts.min() > 0.11 * 8000
    assert counts.max() < 0.14 * 8000


def test_a_share_of_the_training_texts_has_needles_and_held_out_text_none(tiny: Make) -> None:
    data = config(tiny).data
    corpus, plain = load(data), load(dataclasses.replace(data, needle=0.0))
    assert (corpus.vocab_size, plain.vocab_size) == (256 + 44, 256)
    windows = batch(corpus, data, 0, 0)
    assert [(text >= 256).any() for text in windows] == [True] * (data.batch // 2) + [False] * (data.batch // 2)
    rest = windows[data.batch // 2 :]
    assert (rest == batch(plain, dataclasses.replace(data, needle=0.0), 0, 0)[data.batch // 2 :]).all()
    assert long_texts(corpus, 64, 4).max() < 256


def test_needles_decide_what_a_run_is_and_without_them_their_number_does_not(tiny: Make) -> None:
    base = tiny()
    fewer = dataclasses.replace(base, data=dataclasses.replace(base.data, needle_keys=2))
    assert fewer.run_id == base.run_id
    assert "needle_keys" not in base.identity()["data"]
    assert config(tiny, needle_keys=2).run_id != config(tiny).run_id
    assert config(tiny).identity()["data"]["needle_keys"] == 4


@pytest.mark.parametrize("form", ["baseline", "kna_logn", "gemma2", "kna+rerope"])
def test_found_and_weighed_as_the_oracle_does(tiny: Make, form: str) -> None:
    grid = Grid(remedies=(form,), lrs=(0.1,), seeds=(0,), blocks=("mha4",))
    base = config(tiny)
    base = dataclasses.replace(base, model=dataclasses.replace(base.model, d_model=32))
    run = RunState(resolve(make_plan("extrapolation", base, grid).runs[0].config))
    needles, model = run.task.corpus.needles, run.model.eval()
    assert needles is not None
    windows = torch.from_numpy(long_texts(run.task.corpus, 64, 3))
    asked = ask(windows.numpy(), needles, np.random.default_rng(0))
    weights: list[torch.Tensor] = []
    largest: list[torch.Tensor] = []

    def see(call: AttentionCall) -> None:
        full = reference.attend(call.spec, call.q.double(), call.k.double(), call.v.double(), params=call.params)
        weights.append(full.weights)
        q, k = call.encoded()
        scale = float(torch.as_tensor(call.spec.scale.factor(call.pos_q[:, -1:], call.q.shape[-1], {})))
        largest.append(q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2)) * scale)

    with torch.no_grad():
        found = retrieved(model, windows, needles)
        for module in model.modules():
            if isinstance(module, SpecModule):
                module.observers.append(see)
        predicted = model(torch.from_numpy(asked.windows[:, :-1])).argmax(-1)
    pairs = [(n, i, asked.questions[n, i], asked.places[i]) for n in range(3) for i in range(4)]
    hits = [
        [bool(predicted[n, at] == asked.windows[n, at + 1]) for n, i, at, _ in pairs if i == depth]
        for depth in range(4)
    ]
    assert found["needle_by_depth"] == pytest.approx([sum(hit) / 3 for hit in hits])
    assert found["needle"] == pytest.approx(sum(map(sum, hits)) / 12)
    for layer, weight in enumerate(weights):
        mean = torch.stack([weight[n, :, at, place] for n, _, at, place in pairs]).mean(0)
        assert found["needle_weight_by_head"][layer] == pytest.approx(mean.tolist(), rel=1e-4)
        most = [math.exp(c) / (math.exp(c) + 63 * math.exp(0.5)) for c in largest[layer].tolist()]
        assert found["needle_bound_by_head"][layer] == pytest.approx(most, rel=1e-4)
    by_head, bounds = (np.array(found[f"needle_{name}_by_head"]).ravel() for name in ("weight", "bound"))
    assert found["needle_weight"] == by_head.max()
    assert found["needle_bound"] == bounds[by_head.argmax()]


def test_the_table_says_what_was_found_where_models_were_trained_with_needles(tiny: Make, tmp_path: Path) -> None:
    contexts = LongContexts(posthoc=("none", "rerope"), test_lengths=(32, 64), sequences=3)
    grid = Grid(remedies=("kna",), lrs=(0.1,), seeds=(0,), blocks=("gau",))
    run_plan(make_plan("extrapolation", config(tiny), grid, contexts), tmp_path / "s", Execution())
    with open(tmp_path / "s" / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row in rows:
        assert 0 <= float(row["needle"]) <= 1
        assert 0 < float(row["needle_weight"]) < 1
        assert 0 < float(row["needle_bound"]) < 1


def test_needles_that_do_not_fit_are_refused(tiny: Make) -> None:
    data = config(tiny).data
    with pytest.raises(InvalidValueError, match="4 needles, each asked for 3 times, need a context of at least 31"):
        load(dataclasses.replace(data, context=30))
    assert load(dataclasses.replace(data, context=31)).needles
    with pytest.raises(InvalidValueError, match="between 0 and 1"):
        dataclasses.replace(data, needle=2.0)
    with pytest.raises(InvalidValueError, match="needle_keys to be at least 1"):
        dataclasses.replace(data, needle_keys=0)
    with pytest.raises(InvalidValueError, match="needles are for task text"):
        dataclasses.replace(data, task="multimodal")


def test_tokens_of_a_file_take_needles_too(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(np.arange(4000, dtype="<u2").tobytes())
    corpus = load(config(tiny, source=str(tmp_path / "t.bin")).data)
    assert corpus.needles == Needles(first=4000, keys=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_model_learns_to_find_needles_and_a_norm_without_gain_loses_them_among_many_keys() -> None:
    base = dataclasses.replace(EXTRAPOLATION_BASE, data=dataclasses.replace(EXTRAPOLATION_BASE.data, needle=0.5))
    forms = ("baseline", "llama4+rope")
    grid = Grid(remedies=forms, lrs=(0.01,), seeds=(0,), blocks=("mha4",))
    found = {}
    for planned in make_plan("extrapolation", base, grid).runs:
        run = RunState(planned.config)
        arithmetic = TrainingBackend([run])
        for step in range(run.config.steps):
            train_step(arithmetic, [step])
        model, needles = run.model.eval(), run.task.corpus.needles
        assert needles is not None
        with torch.no_grad():
            for length in (64, 512):
                windows = torch.from_numpy(long_texts(run.task.corpus, length, 64))
                found[planned.name, length] = retrieved(model, windows, needles)
    assert all(found[form, 64]["needle"] >= 0.85 for form in forms)
    assert found["llama4+rope", 512]["needle_bound"] <= 0.062  # c = √16 among 512 keys
    assert found["llama4+rope", 512]["needle_weight"] < found["baseline", 512]["needle_weight"] / 2
    assert found["llama4+rope", 512]["needle"] < found["baseline", 512]["needle"]
