"""Trained models on longer texts: accuracy by position, post-hoc methods, and angles between queries and keys."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

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
from qkeel.lab import (
    Execution,
    Grid,
    LongContexts,
    Plan,
    RunConfig,
    make_plan,
    run_plan,
)
from qkeel.lab.angles import Range, cosine_ranges, outside
from qkeel.lab.build_run import layers
from qkeel.lab.checkpoint import RunState
from qkeel.lab.lengths import changed, measure, missing, stretched, trained_on
from qkeel.lab.plan import Method
from qkeel.lab.studies import (
    CONTEXTS,
    EXTRAPOLATION_BASE,
    EXTRAPOLATION_GRID,
    by_position,
    continued,
)
from qkeel.lab.text import Corpus, long_texts
from qkeel.nn.attention import SpecModule
from qkeel.records import RunDirectory, read_json
from qkeel.spec import ALiBi, AttentionCall, Fixed, L2Norm, NoPosition, ReRope
from qkeel.spec.presets import attention_spec

Make = Callable[..., RunConfig]
CLIPPED = Method.parse("rerope:window=3")
CONTEXT = LongContexts(
    posthoc=("none", "rerope:window=3"), test_lengths=(32, 16), sequences=3
)


def plan(
    tiny: Make,
    forms: tuple[str, ...] = ("baseline", "kna"),
    contexts: LongContexts = CONTEXT,
) -> Plan:
    base = dataclasses.replace(tiny(), steps=4)
    return make_plan(
        "extrapolation",
        base,
        Grid(remedies=forms, lrs=(0.1,), seeds=(0,), blocks=("gau",)),
        contexts,
    )


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
        r
        for r in table(done)
        if (r["form"], r["posthoc"], r["test_length"])
        == ("kna", "rerope:window=3", "32")
    )
    place = RunDirectory(done / "runs" / row["run_id"])
    run = RunState(RunConfig.from_dict(place.config()))
    from qkeel.lab.checkpoint import load

    load(place, run)
    model, windows = (
        run.model.eval(),
        torch.from_numpy(long_texts(run.task.corpus, 32, 3)),
    )
    hits: dict[str, list[bool]] = {
        name: [] for name in ("train", "posthoc", "long", "repeat")
    }
    with torch.no_grad():
        for text in windows:
            for start in range(0, 32, 8):
                piece = text[start : start + 9]
                hits["train"] += (
                    model(piece[None, :8])[0].argmax(-1) == piece[1:]
                ).tolist()
                with changed(model, CLIPPED, 8, 32):
                    hits["posthoc"] += (
                        model(piece[None, :8])[0].argmax(-1) == piece[1:]
                    ).tolist()
            again = torch.tensor([text[i % 8] for i in range(33)])
            with changed(model, CLIPPED, 8, 32):
                long = (model(text[None, :32])[0].argmax(-1) == text[1:]).tolist()
                hits["repeat"] += (
                    model(again[None, :32])[0].argmax(-1) == again[1:]
                ).tolist()
            hits["long"] += long
    share = {name: sum(values) / len(values) for name, values in hits.items()}
    assert [len(values) for values in hits.values()] == [96, 96, 96, 96]
    for column, name in (
        ("accuracy_train", "train"),
        ("accuracy_train_posthoc", "posthoc"),
        ("accuracy_nonrepeat", "long"),
        ("accuracy_repeat", "repeat"),
    ):
        assert float(row[column]) == pytest.approx(share[name], abs=1e-12), column


def test_a_killed_study_measures_what_is_missing_and_trains_nothing_again(
    done: Path, tiny: Make
) -> None:
    before, runs = (done / "table.csv").read_bytes(), [r["run_id"] for r in table(done)]
    place = RunDirectory(done / "runs" / runs[0])
    weights, file = (
        place.checkpoint.stat().st_mtime_ns,
        place.path / "extrapolation.jsonl",
    )
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:20])  # torn in the middle of a line
    assert len(missing(place, CONTEXT)) == 3
    run_plan(plan(tiny), done, Execution())
    assert (done / "table.csv").read_bytes() == before
    assert place.checkpoint.stat().st_mtime_ns == weights
    assert len(place.long_contexts()) == 4


def test_the_directory_takes_more_forms_methods_and_lengths_but_not_another_measure(
    done: Path, tiny: Make
) -> None:
    first = {tuple(r.values()) for r in table(done)}
    more = LongContexts(posthoc=("ntk",), test_lengths=(24,), sequences=3)
    run_plan(plan(tiny, ("cosa",), more), done, Execution())
    assert read_json(done / "study.json")["contexts"]["posthoc"] == [
        "none",
        "rerope:window=3",
        "ntk",
    ]
    rows = table(done)
    assert first <= {tuple(r.values()) for r in rows}
    assert len(rows) == 3 * 3 * 3
    known = [r for r in rows if r["accuracy_train"]]
    assert len(known) == len(first) + 1  # what nobody asked of the others is empty
    with pytest.raises(RunDirectoryError, match="3 held-out sequences, not 4"):
        run_plan(
            plan(tiny, contexts=dataclasses.replace(CONTEXT, sequences=4)),
            done,
            Execution(),
        )


def test_what_a_form_refuses_is_an_empty_row_with_the_reason_on_record(
    tiny: Make, tmp_path: Path
) -> None:
    contexts = LongContexts(posthoc=("log_n",), test_lengths=(16,), sequences=1)
    result = run_plan(
        plan(tiny, ("kna_logn", "kna"), contexts), tmp_path / "s", Execution()
    )
    assert not result.failures
    assert [bool(row["accuracy_nonrepeat"]) for row in table(tmp_path / "s")] == [
        False,
        True,
    ]
    place = RunDirectory(tmp_path / "s" / "runs" / table(tmp_path / "s")[0]["run_id"])
    assert "the scale already contains log_n" in place.long_contexts()[0]["refused"]
    measure(RunConfig.from_dict(place.config()), place, contexts)
    assert len(place.long_contexts()) == 1


def test_blocks_have_the_sizes_that_are_compared(tiny: Make) -> None:
    grid = Grid(
        remedies=("kna", "qwen3"),
        lrs=(0.1,),
        seeds=(0,),
        blocks=("gau", "mha1", "mha4"),
    )
    runs = make_plan("extrapolation", EXTRAPOLATION_BASE, grid, CONTEXTS).runs
    sizes = {run.role: run.config.model for run in runs if run.form == "kna"}
    assert {
        role: (m.block, m.n_layers, m.n_heads, m.head_dim) for role, m in sizes.items()
    } == {
        "gau": ("gau", 6, 1, 64),
        "mha1": ("mha", 3, 1, None),
        "mha4": ("mha", 3, 4, None),
    }
    assert {run.config.model.attention for run in runs} == {
        "kna:train_length=64",
        "qwen3",
    }
    assert len(make_plan("extrapolation").runs) == len(EXTRAPOLATION_GRID.remedies) * 2


def test_a_method_is_undone_and_changes_every_layer(tiny: Make) -> None:
    model = RunState(plan(tiny).runs[0].config).model
    specs = [module.spec for module in model.modules() if hasattr(module, "spec")]
    with changed(model, Method.parse("ntk"), 8, 32):
        assert all(
            "NTK" in m.spec.position.formula()
            for m in model.modules()
            if hasattr(m, "spec")
        )
    assert [m.spec for m in model.modules() if hasattr(m, "spec")] == specs
    with (
        pytest.raises(RefusedError, match="an unmodified RoPE"),
        changed(model, Method.parse("ntk"), 8, 32),
        changed(model, Method.parse("pi"), 8, 32),
    ):
        pass


def test_long_texts_never_cross_from_one_document_into_the_next() -> None:
    lengths = [5, 40, 9, 33, 32, 100]
    tokens = np.concatenate(
        [np.full(n, i, dtype=np.uint8) for i, n in enumerate(lengths)]
    )
    held = {"train": tokens, "heldout": tokens, "ends": np.cumsum(lengths)}
    corpus = Corpus(name="six", vocab_size=256, loss_unit="byte", sha256="", **held)
    windows = long_texts(corpus, 32, 10)
    assert windows.shape == (5, 33)
    assert windows[:, 0].tolist() == [1, 3, 5, 5, 5]
    assert (windows == windows[:, :1]).all()
    with pytest.raises(DataError, match="more than 128 bytes; the longest has 100"):
        long_texts(corpus, 128, 1)


def test_a_method_may_be_for_one_form_only(tiny: Make, tmp_path: Path) -> None:
    contexts = LongContexts(
        posthoc=("none", "baseline/ntk"), test_lengths=(16,), sequences=2
    )
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
    assert (str(method), method.label) == (
        "kna/rerope:window=3+log_n@32",
        "rerope:window=3+log_n@32",
    )
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
    assert all(
        torch.equal(value, before[name])
        for name, value in run.model.state_dict().items()
    )
    assert any(
        not torch.equal(value, before[name])
        for name, value in model.state_dict().items()
    )
    formulas = {
        m.spec.position.formula() for m in model.modules() if isinstance(m, SpecModule)
    }
    assert formulas == {"RoPE(base 10000, PI ×4)"}
    assert continued(256) == [
        "kna/none@256",
        "baseline/none@256",
        "baseline/pi@256",
        "baseline/abf@256",
    ]


def test_forms_take_other_positions_and_gains(tiny: Make) -> None:
    forms = (
        *by_position(["kna"], ["rope", "nope", "kerple_log", "hwfa", "rerope"]),
        "cosa:gain=true",
    )
    runs = {run.form: run.config for run in plan(tiny, forms).runs}
    assert (runs["kna+rerope"].model.attention, runs["kna+rerope"].model.position) == (
        "kna:train_length=8",
        "rerope",
    )
    assert runs["cosa:gain=true"].model.attention == "cosa:gain=true,train_length=8"
    assert attention_spec("cosa:gain=true").norm == L2Norm(gain="dim")
    formulas = [
        [spec.position.formula() for spec in layers(runs[form].model, 8)]
        for form in ("kna+nope", "kna+hwfa")
    ]
    assert formulas[0] == ["no position"] * 4
    assert formulas[1][-1] == "no position"
    assert "|i - j| < 2" in formulas[1][0]
    assert layers(runs["kna+rerope"].model, 8)[0].position == ReRope(window=4)


@pytest.mark.parametrize("form", ["baseline", "cosa_logn", "kna+alibi"])
@pytest.mark.parametrize("method", ["none", "rerope:window=3"])
def test_angles_are_those_of_all_visible_pairs(
    tiny: Make, form: str, method: str
) -> None:
    if "+" in form and method != "none":
        pytest.skip("only RoPE is clipped after training")
    run = RunState(plan(tiny, (form,)).runs[0].config)
    model, tokens = (
        run.model,
        torch.from_numpy(long_texts(run.task.corpus, 256, 2))[:, :-1],
    )
    cosines: list[torch.Tensor] = []

    def see(call: AttentionCall) -> None:
        full = dataclasses.replace(call.spec, scale=Fixed(1.0), norm=L2Norm())
        if isinstance(full.position, ALiBi):
            full = dataclasses.replace(full, position=NoPosition())
        cos = reference.attend(
            full, call.q.double(), call.k.double(), call.v.double()
        ).logits
        cosines.append(cos[torch.ones_like(cos, dtype=torch.bool).tril()])

    ranges = [Range(torch.tensor([-0.1]), torch.tensor([0.3]))] * 4
    with torch.no_grad(), changed(model, Method.parse(method), 8, 256):
        found, met = (
            outside(model, [tokens[:1], tokens[1:]], ranges),
            cosine_ranges(model, [tokens]),
        )
        for module in model.modules():
            if isinstance(module, SpecModule):
                module.observers.append(see)
        model(tokens)
    shares = [((c < -0.1) | (c > 0.3)).double().mean().item() for c in cosines]
    assert (found.outside / found.pairs)[:, 0].tolist() == pytest.approx(
        shares, abs=1e-4
    )
    assert found.pairs.unique().tolist() == [2 * 256 * 257 / 2]
    assert [float(r.low[0]) for r in met] == pytest.approx(
        [float(c.min()) for c in cosines], abs=1e-5
    )
    assert [float(r.high[0]) for r in met] == pytest.approx(
        [float(c.max()) for c in cosines], abs=1e-5
    )
