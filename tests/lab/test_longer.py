"""Needles: what they are, where they are put, how many are found, and the attention that they get."""

from __future__ import annotations

import csv
import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qkeel import reference
from qkeel.errors import DataError, InvalidValueError, RefusedError, RunDirectoryError, UnknownNameError
from qkeel.lab import Execution, Grid, LongContexts, Plan, RunConfig, make_plan, run_plan
from qkeel.lab.build_run import layers, resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.lengths import Range, changed, cosine_ranges, measure, missing, outside, retrieved, stretched, trained_on
from qkeel.lab.plan import Method
from qkeel.lab.studies import CONTEXTS, EXTRAPOLATION_BASE, EXTRAPOLATION_GRID, by_position, continued
from qkeel.lab.text import VALUES, Corpus, Needles, ask, batch, insert_needles, load, long_texts
from qkeel.lab.train import train_step
from qkeel.nn.attention import SpecModule
from qkeel.records import RunDirectory, read_json
from qkeel.spec import ALiBi, AttentionCall, Fixed, L2Norm, NoPosition, ReRope
from qkeel.spec.presets import attention_spec

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


def test_a_share_of_the_training_texts_has_needles_and_held_out_text_none(tiny: Make) -> None:
    data = config(tiny).data
    corpus, plain = load(data), load(dataclasses.replace(data, needle=0.0))
    assert (corpus.vocab_size, plain.vocab_size) == (256 + 44, 256)
    windows = batch(corpus, data, 0, 0)
    assert [(text >= 256).any() for text in windows] == [True] * (data.batch // 2) + [False] * (data.batch // 2)
    rest = windows[data.batch // 2 :]
    assert (rest == batch(plain, dataclasses.replace(data, needle=0.0), 0, 0)[data.batch // 2 :]).all()
    assert long_texts(corpus, 64, 4).max() < 256


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


def test_needles_that_do_not_fit_are_refused(tiny: Make) -> None:
    data = config(tiny).data
    with pytest.raises(InvalidValueError, match="4 needles with 3 questions each need a context of at least 31"):
        load(dataclasses.replace(data, context=30))
    assert load(dataclasses.replace(data, context=31)).needles
    with pytest.raises(InvalidValueError, match="at least 0 and at most 1"):
        dataclasses.replace(data, needle=2.0)
    with pytest.raises(InvalidValueError, match="at least 1 for needle_keys"):
        dataclasses.replace(data, needle_keys=0)
    with pytest.raises(InvalidValueError, match="needles need task=text"):
        dataclasses.replace(data, task="multimodal")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_model_learns_to_find_needles_and_a_norm_without_gain_loses_them_among_many_keys() -> None:
    base = dataclasses.replace(EXTRAPOLATION_BASE, data=dataclasses.replace(EXTRAPOLATION_BASE.data, needle=0.5))
    forms = ("baseline", "llama4+rope")
    grid = Grid(remedies=forms, lrs=(0.01,), seeds=(0,), blocks=("mha4",))
    found = {}
    for planned in make_plan("extrapolation", base, grid).runs:
        run = RunState(planned.config)
        for step in range(run.config.steps):
            train_step(run, step)
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


CLIPPED = Method.parse("rerope:window=3")
CONTEXT = LongContexts(posthoc=("none", "rerope:window=3"), test_lengths=(32, 16), sequences=3)


def plan(tiny: Make, forms: tuple[str, ...] = ("baseline", "kna"), contexts: LongContexts = CONTEXT) -> Plan:
    base = dataclasses.replace(tiny(), steps=4)
    return make_plan("extrapolation", base, Grid(remedies=forms, lrs=(0.1,), seeds=(0,), blocks=("gau",)), contexts)


def table(out: Path) -> list[dict[str, str]]:
    with open(out / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def once(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("once") / "s"
    assert not run_plan(plan(tiny), out, Execution()).failures
    return out


@pytest.fixture
def done(once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(once, tmp_path / "s")


def test_the_numbers_are_those_of_the_weights_token_by_token(done: Path) -> None:
    row = next(
        r for r in table(done) if (r["form"], r["posthoc"], r["test_length"]) == ("kna", "rerope:window=3", "32")
    )
    place = RunDirectory(done / "runs" / row["run_id"])
    run = RunState(RunConfig.from_dict(place.config()))
    from qkeel.lab.checkpoint import load

    load(place, run)
    model, windows = run.model.eval(), torch.from_numpy(long_texts(run.task.corpus, 32, 3))
    hits: dict[str, list[bool]] = {name: [] for name in ("train", "posthoc", "long", "last", "short", "repeat")}
    with torch.no_grad():
        for text in windows:
            for start in range(0, 32, 8):
                piece = text[start : start + 9]
                hits["train"] += (model(piece[None, :8])[0].argmax(-1) == piece[1:]).tolist()
                with changed(model, CLIPPED, 8, 32):
                    hits["posthoc"] += (model(piece[None, :8])[0].argmax(-1) == piece[1:]).tolist()
            again = torch.tensor([text[i % 8] for i in range(33)])
            with changed(model, CLIPPED, 8, 32):
                long = (model(text[None, :32])[0].argmax(-1) == text[1:]).tolist()
                hits["short"] += (model(text[None, 24:32])[0].argmax(-1) == text[25:]).tolist()
                hits["repeat"] += (model(again[None, :32])[0].argmax(-1) == again[1:]).tolist()
            hits["long"] += long
            hits["last"] += long[-8:]
    share = {name: sum(values) / len(values) for name, values in hits.items()}
    assert [len(values) for values in hits.values()] == [96, 96, 96, 24, 24, 96]
    for column, name in (
        ("accuracy_train", "train"),
        ("accuracy_train_posthoc", "posthoc"),
        ("accuracy_nonrepeat", "long"),
        ("accuracy_last", "last"),
        ("accuracy_last_short", "short"),
        ("accuracy_repeat", "repeat"),
    ):
        assert float(row[column]) == pytest.approx(share[name], abs=1e-12), column


def test_a_killed_study_measures_what_is_missing_and_trains_nothing_again(done: Path, tiny: Make) -> None:
    before, runs = (done / "table.csv").read_bytes(), [r["run_id"] for r in table(done)]
    place = RunDirectory(done / "runs" / runs[0])
    weights, file = place.checkpoint.stat().st_mtime_ns, place.path / "extrapolation.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:20])  # torn in the middle of a line
    assert len(missing(place, CONTEXT)) == 3
    run_plan(plan(tiny), done, Execution())
    assert (done / "table.csv").read_bytes() == before
    assert place.checkpoint.stat().st_mtime_ns == weights
    assert len(place.long_contexts()) == 4


def test_the_directory_takes_more_forms_methods_and_lengths_but_not_another_measure(done: Path, tiny: Make) -> None:
    first = {tuple(r.values()) for r in table(done)}
    more = LongContexts(posthoc=("ntk",), test_lengths=(24,), sequences=3)
    run_plan(plan(tiny, ("cosa",), more), done, Execution())
    assert read_json(done / "study.json")["contexts"]["posthoc"] == ["none", "rerope:window=3", "ntk"]
    rows = table(done)
    assert first <= {tuple(r.values()) for r in rows}
    assert len(rows) == 3 * 3 * 3
    known = [r for r in rows if r["accuracy_train"]]
    assert len(known) == len(first) + 1  # what nobody asked of the others is empty
    with pytest.raises(RunDirectoryError, match="3 held-out sequences, not 4"):
        run_plan(plan(tiny, contexts=dataclasses.replace(CONTEXT, sequences=4)), done, Execution())


def test_what_a_form_refuses_is_an_empty_row_with_the_reason_on_record(tiny: Make, tmp_path: Path) -> None:
    contexts = LongContexts(posthoc=("log_n",), test_lengths=(16,), sequences=1)
    result = run_plan(plan(tiny, ("kna_logn", "kna"), contexts), tmp_path / "s", Execution())
    assert not result.failures
    assert [bool(row["accuracy_nonrepeat"]) for row in table(tmp_path / "s")] == [False, True]
    place = RunDirectory(tmp_path / "s" / "runs" / table(tmp_path / "s")[0]["run_id"])
    assert "the scale already contains log_n" in place.long_contexts()[0]["refused"]
    measure(RunConfig.from_dict(place.config()), place, contexts)
    assert len(place.long_contexts()) == 1


def test_blocks_have_the_sizes_that_are_compared(tiny: Make) -> None:
    grid = Grid(remedies=("kna", "qwen3"), lrs=(0.1,), seeds=(0,), blocks=("gau", "mha1", "mha4"))
    runs = make_plan("extrapolation", EXTRAPOLATION_BASE, grid, CONTEXTS).runs
    sizes = {run.role: run.config.model for run in runs if run.form == "kna"}
    assert {role: (m.block, m.n_layers, m.n_heads, m.head_dim) for role, m in sizes.items()} == {
        "gau": ("gau", 6, 1, 64),
        "mha1": ("mha", 3, 1, None),
        "mha4": ("mha", 3, 4, None),
    }
    assert {run.config.model.attention for run in runs} == {"kna:train_length=64", "qwen3"}
    assert len(make_plan("extrapolation").runs) == len(EXTRAPOLATION_GRID.remedies) * 2


def test_a_method_is_undone_and_changes_every_layer(tiny: Make) -> None:
    model = RunState(plan(tiny).runs[0].config).model
    specs = [module.spec for module in model.modules() if hasattr(module, "spec")]
    with changed(model, Method.parse("ntk"), 8, 32):
        assert all("NTK" in m.spec.position.formula() for m in model.modules() if hasattr(m, "spec"))
    assert [m.spec for m in model.modules() if hasattr(m, "spec")] == specs
    with (
        pytest.raises(RefusedError, match="an unmodified RoPE"),
        changed(model, Method.parse("ntk"), 8, 32),
        changed(model, Method.parse("pi"), 8, 32),
    ):
        pass


def test_long_texts_never_cross_from_one_document_into_the_next() -> None:
    lengths = [5, 40, 9, 33, 32, 100]
    tokens = np.concatenate([np.full(n, i, dtype=np.uint8) for i, n in enumerate(lengths)])
    held = {"train": tokens, "heldout": tokens, "ends": np.cumsum(lengths)}
    corpus = Corpus(name="six", vocab_size=256, loss_unit="byte", sha256="", **held)
    windows = long_texts(corpus, 32, 10)
    assert windows.shape == (5, 33)
    assert windows[:, 0].tolist() == [1, 3, 5, 5, 5]
    assert (windows == windows[:, :1]).all()
    with pytest.raises(DataError, match="more than 128 bytes; the longest has 100"):
        long_texts(corpus, 128, 1)


def test_a_method_may_be_for_one_form_only(tiny: Make, tmp_path: Path) -> None:
    contexts = LongContexts(posthoc=("none", "baseline/ntk"), test_lengths=(16,), sequences=2)
    assert contexts.of("kna").posthoc == ("none",)
    assert LongContexts(posthoc=("baseline/ntk",)).of("kna").posthoc == ("none",)
    run_plan(plan(tiny, contexts=contexts), tmp_path / "s", Execution())
    assert [(r["form"], r["posthoc"]) for r in table(tmp_path / "s")] == [
        ("baseline", "none"),
        ("baseline", "ntk"),
        ("kna", "none"),
    ]


def test_methods_joined_by_a_plus_are_applied_one_after_the_other(tiny: Make) -> None:
    method = Method.parse("kna/rerope:window=3+log_n@32")
    assert (str(method), method.label) == ("kna/rerope:window=3+log_n@32", "rerope:window=3+log_n@32")
    spec = attention_spec("qwen3")
    once = spec.extrapolate("rerope", factor=4, train_length=8, window=3)
    both = stretched(spec, Method.parse("rerope:window=3+log_n"), 8, 32)
    assert both == once.extrapolate("log_n", factor=4, train_length=8)
    assert both not in (once, spec)
    with pytest.raises(UnknownNameError, match="log_n"):
        plan(tiny, contexts=dataclasses.replace(CONTEXT, posthoc=("rerope+logn",)))
    with pytest.raises(InvalidValueError, match="empty name"):
        Method.parse("rerope+")


def test_training_on_changes_a_copy_of_the_weights_under_the_method(tiny: Make) -> None:
    run = RunState(plan(tiny).runs[0].config)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    model = trained_on(run, Method.parse("pi@32"), 2)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    formulas = {m.spec.position.formula() for m in model.modules() if isinstance(m, SpecModule)}
    assert formulas == {"RoPE(base 10000, PI ×4)"}
    assert continued(256) == ["kna/none@256", "baseline/none@256", "baseline/pi@256", "baseline/abf@256"]


def test_forms_take_other_positions_and_gains(tiny: Make) -> None:
    forms = (*by_position(["kna"], ["rope", "nope", "kerple_log", "hwfa", "rerope"]), "cosa:gain=true")
    runs = {run.form: run.config for run in plan(tiny, forms).runs}
    assert (runs["kna+rerope"].model.attention, runs["kna+rerope"].model.position) == ("kna:train_length=8", "rerope")
    assert runs["cosa:gain=true"].model.attention == "cosa:gain=true,train_length=8"
    assert attention_spec("cosa:gain=true").norm == L2Norm(gain="dim")
    formulas = [[spec.position.formula() for spec in layers(runs[form].model, 8)] for form in ("kna+nope", "kna+hwfa")]
    assert formulas[0] == ["no position"] * 4
    assert formulas[1][-1] == "no position"
    assert "|i - j| < 2" in formulas[1][0]
    assert layers(runs["kna+rerope"].model, 8)[0].position == ReRope(window=4)


@pytest.mark.parametrize("form", ["baseline", "cosa_logn", "kna+alibi"])
@pytest.mark.parametrize("method", ["none", "rerope:window=3"])
def test_angles_are_those_of_all_visible_pairs(tiny: Make, form: str, method: str) -> None:
    if "+" in form and method != "none":
        pytest.skip("only RoPE is clipped after training")
    run = RunState(plan(tiny, (form,)).runs[0].config)
    model, tokens = run.model, torch.from_numpy(long_texts(run.task.corpus, 256, 2))[:, :-1]
    cosines: list[torch.Tensor] = []
    largest: list[float] = []

    def see(call: AttentionCall) -> None:
        full = dataclasses.replace(call.spec, scale=Fixed(1.0), norm=L2Norm())
        if isinstance(full.position, ALiBi):
            full = dataclasses.replace(full, position=NoPosition())
        cos = reference.attend(full, call.q.double(), call.k.double(), call.v.double()).logits
        cosines.append(cos[torch.ones_like(cos, dtype=torch.bool).tril()])
        q, k = call.encoded()
        scale = float(torch.as_tensor(call.spec.scale.factor(call.pos_q[:, -1:], 16, {})))
        largest.append(float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) * scale)

    ranges = [Range(torch.tensor([-0.1]), torch.tensor([0.3]))] * 4
    with torch.no_grad(), changed(model, Method.parse(method), 8, 256):
        found, met = outside(model, [tokens[:1], tokens[1:]], ranges), cosine_ranges(model, [tokens])
        for module in model.modules():
            if isinstance(module, SpecModule):
                module.observers.append(see)
        model(tokens)
    shares = [((c < -0.1) | (c > 0.3)).double().mean().item() for c in cosines]
    assert (found.outside / found.pairs)[:, 0].tolist() == pytest.approx(shares, abs=1e-4)
    assert found.pairs.unique().tolist() == [2 * 256 * 257 / 2]
    assert found.largest_logit[:, 0].tolist() == pytest.approx(largest, rel=1e-5)
    assert [float(r.low[0]) for r in met] == pytest.approx([float(c.min()) for c in cosines], abs=1e-5)
    assert [float(r.high[0]) for r in met] == pytest.approx([float(c.max()) for c in cosines], abs=1e-5)
    assert found.dilution(256)[:, 0].tolist() == pytest.approx(
        [math.exp(c) / (math.exp(c) + 255 * math.exp(0.5)) for c in largest], rel=1e-5
    )
