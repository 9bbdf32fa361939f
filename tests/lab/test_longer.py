"""Trained models on longer texts: accuracy by position, post-hoc methods, and angles between queries and keys."""

import csv
import dataclasses
import shutil

import numpy as np
import pytest
import torch

from qkeel import reference
from qkeel.errors import (
    DataError,
    InvalidValueError,
    RefusedError,
    RunDirectoryError,
    UnknownNameError,
)
from qkeel.lab import Grid, LongContexts, RunConfig, make_plan, run_plan
from qkeel.lab.angles import Range, cosine_ranges, observed, outside
from qkeel.lab.build_run import layers
from qkeel.lab.checkpoint import RunState, load
from qkeel.lab.lengths import changed, measure, missing, stretched, trained_on
from qkeel.lab.plan import Method
from qkeel.lab.text import Corpus, long_texts
from qkeel.nn.attention import SpecModule
from qkeel.records import RunDirectory, read_json
from qkeel.spec import ALiBi, Fixed, L2Norm, NoPosition, ReRope
from qkeel.spec.presets import attention_spec

CLIPPED = "rerope:window=3"
CONTEXTS = LongContexts(posthoc=("none", CLIPPED), test_lengths=(32, 16), sequences=3)


def plan(
    tiny,
    forms=("baseline", "kna"),
    contexts=CONTEXTS,
):
    grid = Grid(remedies=forms, lrs=(0.1,), seeds=(0,), blocks=("gau",))
    return make_plan("extrapolation", tiny(steps=4), grid, contexts)


def table(out):
    with open(out / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def once(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("once") / "s"
    assert not run_plan(plan(tiny), out).failures
    return out


@pytest.fixture
def done(once, tmp_path):
    return shutil.copytree(once, tmp_path / "s")


def hits(model, windows):
    """The share of tokens that are predicted rightly, one text after the other."""
    shares = [
        (model(text[None, :-1])[0].argmax(-1) == text[1:]).double().mean()
        for text in windows
    ]
    return float(torch.stack(shares).mean())


@torch.no_grad()
def test_the_numbers_are_those_of_the_weights_text_by_text(done):
    (row,) = [
        row
        for row in table(done)
        if (row["form"], row["posthoc"], row["test_length"]) == ("kna", CLIPPED, "32")
    ]
    place = RunDirectory(done / "runs" / row["run_id"])
    run = RunState(RunConfig.from_dict(place.config()))
    load(place, run)
    model, method = run.model.eval(), Method.parse(CLIPPED)
    texts = torch.from_numpy(long_texts(run.task.corpus, 32, 3))
    pieces = texts.unfold(1, 9, 8).flatten(0, 1)
    repeated = texts[:, torch.arange(33) % 8]
    shares = {"accuracy_train": hits(model, pieces)}
    with changed(model, method, 8, 32):
        shares["accuracy_train_posthoc"] = hits(model, pieces)
        shares["accuracy_nonrepeat"] = hits(model, texts)
        shares["accuracy_repeat"] = hits(model, repeated)
    assert {name: float(row[name]) for name in shares} == pytest.approx(shares)


def test_a_killed_study_measures_what_is_missing_and_trains_nothing_again(done, tiny):
    before = (done / "table.csv").read_bytes()
    place = RunDirectory(done / "runs" / table(done)[0]["run_id"])
    weights, file = (
        place.checkpoint.stat().st_mtime_ns,
        place.path / "extrapolation.jsonl",
    )
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:20])  # torn in the middle of a line
    assert len(missing(place, CONTEXTS)) == 3
    run_plan(plan(tiny), done)
    assert (done / "table.csv").read_bytes() == before
    assert place.checkpoint.stat().st_mtime_ns == weights
    assert len(place.long_contexts()) == 4


def test_the_directory_takes_more_forms_methods_and_lengths_but_not_another_measure(
    done, tiny
):
    first = {tuple(row.values()) for row in table(done)}
    more = LongContexts(posthoc=("ntk",), test_lengths=(24,), sequences=3)
    run_plan(plan(tiny, ("cosa",), more), done)
    methods = read_json(done / "study.json")["contexts"]["posthoc"]
    assert methods == ["none", CLIPPED, "ntk"]
    rows = table(done)
    assert first <= {tuple(row.values()) for row in rows}
    assert len(rows) == 3 * 3 * 3
    # What nobody asked of the others is empty.
    assert sum(bool(row["accuracy_train"]) for row in rows) == len(first) + 1
    other = dataclasses.replace(CONTEXTS, sequences=4)
    with pytest.raises(RunDirectoryError, match="3 held-out sequences, not 4"):
        run_plan(plan(tiny, contexts=other), done)


def test_what_a_form_refuses_is_an_empty_row_and_a_method_may_be_for_one_form(
    tiny, tmp_path
):
    contexts = LongContexts(
        posthoc=("kna_logn/log_n", "kna/ntk"), test_lengths=(16,), sequences=1
    )
    assert contexts.of("baseline").posthoc == ("none",)
    assert not run_plan(plan(tiny, ("kna_logn", "kna"), contexts), tmp_path).failures
    rows = table(tmp_path)
    assert [(row["posthoc"], bool(row["accuracy_nonrepeat"])) for row in rows] == [
        ("log_n", False),
        ("ntk", True),
    ]
    place = RunDirectory(tmp_path / "runs" / rows[0]["run_id"])
    assert "already contains log_n" in place.long_contexts()[0]["refused"]
    measure(RunConfig.from_dict(place.config()), place, contexts.of("kna_logn"))
    assert len(place.long_contexts()) == 1


def test_blocks_have_the_sizes_that_are_compared():
    grid = Grid(
        remedies=("kna",), lrs=(0.1,), seeds=(0,), blocks=("gau", "mha1", "mha4")
    )
    runs = make_plan("extrapolation", grid=grid).runs
    models = {run.role: run.config.model for run in runs}
    assert {
        role: (m.block, m.n_layers, m.n_heads, m.head_dim, m.attention)
        for role, m in models.items()
    } == {
        "gau": ("gau", 6, 1, 64, "kna:train_length=64"),
        "mha1": ("mha", 3, 1, None, "kna:train_length=64"),
        "mha4": ("mha", 3, 4, None, "kna:train_length=64"),
    }
    assert len(make_plan("extrapolation").runs) == 8 * 2


def formulas(model):
    modules = [m for m in model.modules() if isinstance(m, SpecModule)]
    return {module.spec.position.formula() for module in modules}


def test_a_method_changes_every_layer_and_is_undone(tiny):
    run = RunState(plan(tiny).runs[0].config)
    model, ntk, before = run.model, Method.parse("ntk"), formulas(run.model)
    with changed(model, ntk, 8, 32):
        assert all("NTK" in formula for formula in formulas(model))
        with pytest.raises(RefusedError, match="an unmodified RoPE"):
            changed(model, Method.parse("pi"), 8, 32).__enter__()
    assert formulas(model) == before
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    longer = trained_on(run, Method.parse("pi@32"), 2)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    changes = [
        not torch.equal(x, weights[name]) for name, x in longer.state_dict().items()
    ]
    assert any(changes)
    assert formulas(longer) == {"RoPE(base 10000, PI ×4)"}


def test_long_texts_never_cross_from_one_document_into_the_next():
    lengths = [5, 40, 9, 33, 32, 100]
    tokens = np.repeat(np.arange(6, dtype=np.uint8), lengths)
    sides = {"train": tokens, "heldout": tokens, "ends": np.cumsum(lengths)}
    corpus = Corpus(name="six", vocab_size=256, loss_unit="byte", sha256="", **sides)
    windows = long_texts(corpus, 32, 10)
    assert windows.shape == (5, 33)
    assert windows[:, 0].tolist() == [1, 3, 5, 5, 5]
    assert (windows == windows[:, :1]).all()
    with pytest.raises(DataError, match="more than 128 bytes; the longest has 100"):
        long_texts(corpus, 128, 1)


def test_methods_joined_by_a_plus_are_applied_one_after_the_other(tiny):
    method = Method.parse(f"kna/{CLIPPED}+log_n@32")
    assert str(method) == f"kna/{CLIPPED}+log_n@32"
    assert method.label == f"{CLIPPED}+log_n@32"
    spec = attention_spec("qwen3")
    once = spec.extrapolate("rerope", factor=4, train_length=8, window=3)
    both = stretched(spec, Method.parse(f"{CLIPPED}+log_n"), 8, 32)
    assert both == once.extrapolate("log_n", factor=4, train_length=8)
    assert both not in (once, spec)
    for posthoc, error in (
        ("rerope+logn", UnknownNameError),
        ("rerope+", InvalidValueError),
        ("pi@0", InvalidValueError),
        ("pi@12", InvalidValueError),
    ):
        with pytest.raises(error):
            plan(tiny, contexts=LongContexts(posthoc=(posthoc,), test_lengths=(16,)))


def test_forms_take_other_positions_and_gains(tiny):
    forms = ("kna", "kna+nope", "kna+hwfa", "kna+rerope", "cosa:gain=true")
    models = {run.form: run.config.model for run in plan(tiny, forms).runs}
    assert models["kna+rerope"].attention == "kna:train_length=8"
    assert models["cosa:gain=true"].attention == "cosa:gain=true,train_length=8"
    assert attention_spec("cosa:gain=true").norm == L2Norm(gain="dim")
    specs = {form: layers(model, 8) for form, model in models.items()}
    assert {s.position.formula() for s in specs["kna+nope"]} == {"no position"}
    assert specs["kna+hwfa"][-1].position.formula() == "no position"
    assert "|i - j| < 2" in specs["kna+hwfa"][0].position.formula()
    assert specs["kna+rerope"][0].position == ReRope(window=4)


@pytest.mark.parametrize(
    ("form", "method"),
    [
        ("baseline", "none"),
        ("baseline", CLIPPED),
        ("cosa_logn", CLIPPED),
        ("kna+alibi", "none"),
    ],
)
@torch.no_grad()
def test_angles_are_those_of_all_visible_pairs(tiny, form, method):
    run = RunState(plan(tiny, (form,)).runs[0].config)
    tokens = torch.from_numpy(long_texts(run.task.corpus, 256, 2))[:, :-1]
    cosines = []

    def keep(layer, call):
        spec = dataclasses.replace(call.spec, scale=Fixed(1.0), norm=L2Norm())
        if isinstance(spec.position, ALiBi):
            spec = dataclasses.replace(spec, position=NoPosition())
        q, k, v = (x.double() for x in (call.q, call.k, call.v))
        logits = reference.attend(spec, q, k, v).logits
        cosines.append(logits[torch.ones_like(logits, dtype=torch.bool).tril()])

    ranges = [Range(torch.tensor([-0.1]), torch.tensor([0.3]))] * 4
    with changed(run.model, Method.parse(method), 8, 256):
        counted = outside(run.model, [tokens[:1], tokens[1:]], ranges)
        extremes = cosine_ranges(run.model, [tokens])
        with observed(run.model, keep):
            run.model(tokens)
    shares = [((c < -0.1) | (c > 0.3)).double().mean().item() for c in cosines]
    ours = (counted.outside / counted.pairs)[:, 0].tolist()
    assert ours == pytest.approx(shares, abs=1e-4)
    assert counted.pairs.unique().tolist() == [2 * 256 * 257 / 2]
    for found, cosine in zip(extremes, cosines, strict=True):
        exact = [float(cosine.min()), float(cosine.max())]
        assert [float(found.low), float(found.high)] == pytest.approx(exact, abs=1e-5)
