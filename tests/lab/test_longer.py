"""The extrapolation study: what it measures, its table, and going on after a kill."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkeel.errors import DataError, InvalidValueError, QkeelError, RefusedError, RunDirectoryError, UnknownNameError
from qkeel.lab import Execution, Grid, LongContexts, Plan, RunConfig, make_plan, run_plan
from qkeel.lab.data import heldout
from qkeel.lab.longer import changed, measure, missing
from qkeel.lab.studies.extrapolation import BASE, CONTEXTS, DEFAULT
from qkeel.lab.trainer import Trainer
from qkeel.records import EXTRAPOLATION_COLUMNS, RunDirectory, read_json

Make = Callable[..., RunConfig]
CONTEXT = LongContexts(posthoc=("none", "rerope:window=3"), test_lengths=(32, 16), sequences=3)


def plan(tiny: Make, forms: tuple[str, ...] = ("baseline", "kna"), contexts: LongContexts = CONTEXT) -> Plan:
    base = dataclasses.replace(tiny(), steps=4)
    return make_plan("extrapolation", base, Grid(remedies=forms, lrs=(0.1,), seeds=(0,), blocks=("gau",)), contexts)


def table(out: Path) -> list[dict[str, str]]:
    with open(out / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def done(tiny: Make, tmp_path: Path) -> Path:
    result = run_plan(plan(tiny), tmp_path / "s", Execution())
    assert not result.failures
    return tmp_path / "s"


def test_the_table_has_a_row_for_each_run_method_and_length(done: Path) -> None:
    rows = table(done)
    assert list(rows[0]) == list(EXTRAPOLATION_COLUMNS)
    assert ",".join(rows[0]).startswith(
        "block,form,posthoc,seed,train_length,test_length,accuracy_train,accuracy_nonrepeat,accuracy_repeat,"
        "accuracy_last,kept_nonrepeat,loss_train,loss_nonrepeat,max_logit,run_id"
    )
    assert [(r["block"], r["form"], r["posthoc"], r["train_length"], r["test_length"]) for r in rows] == [
        ("gau", form, method, "8", length)
        for form in ("baseline", "kna")
        for method in ("none", "rerope:window=3")
        for length in ("16", "32")
    ]
    for row in rows:
        kept = float(row["accuracy_nonrepeat"]) / float(row["accuracy_train"])
        assert float(row["kept_nonrepeat"]) == pytest.approx(kept, rel=1e-12)
        assert float(row["max_logit"]) == RunDirectory(done / "runs" / row["run_id"]).summary()["max_logit"]


def test_the_numbers_are_those_of_the_weights_token_by_token(done: Path) -> None:
    row = next(
        r for r in table(done) if (r["form"], r["posthoc"], r["test_length"]) == ("kna", "rerope:window=3", "32")
    )
    place = RunDirectory(done / "runs" / row["run_id"])
    trainer = Trainer(RunConfig.from_dict(place.config()))
    from qkeel.lab.checkpoint import load

    load(place, trainer.trained)
    model, windows = trainer.trained.model.eval(), torch.from_numpy(heldout(trainer.corpus, 32, 3))
    hits: dict[str, list[bool]] = {name: [] for name in ("train", "posthoc", "long", "last", "repeat")}
    with torch.no_grad():
        for text in windows:
            for start in range(0, 32, 8):
                piece = text[start : start + 9]
                hits["train"] += (model(piece[None, :8])[0].argmax(-1) == piece[1:]).tolist()
                with changed(model, "rerope:window=3", 8, 32):
                    hits["posthoc"] += (model(piece[None, :8])[0].argmax(-1) == piece[1:]).tolist()
            again = torch.tensor([text[i % 8] for i in range(33)])
            with changed(model, "rerope:window=3", 8, 32):
                long = (model(text[None, :32])[0].argmax(-1) == text[1:]).tolist()
                hits["repeat"] += (model(again[None, :32])[0].argmax(-1) == again[1:]).tolist()
            hits["long"] += long
            hits["last"] += long[-8:]
    share = {name: sum(values) / len(values) for name, values in hits.items()}
    assert [len(values) for values in hits.values()] == [96, 96, 96, 24, 96]
    for column, name in (
        ("accuracy_train", "train"),
        ("accuracy_train_posthoc", "posthoc"),
        ("accuracy_nonrepeat", "long"),
        ("accuracy_last", "last"),
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
    assert "in this scale already" in place.long_contexts()[0]["refused"]
    measure(RunConfig.from_dict(place.config()), place, contexts)
    assert len(place.long_contexts()) == 1


def test_blocks_have_the_sizes_that_are_compared(tiny: Make) -> None:
    grid = Grid(remedies=("kna", "qwen3"), lrs=(0.1,), seeds=(0,), blocks=("gau", "mha1", "mha4"))
    runs = make_plan("extrapolation", BASE, grid, CONTEXTS).runs
    sizes = {run.role: run.config.model for run in runs if run.form == "kna"}
    assert {role: (m.block, m.n_layers, m.n_heads, m.head_dim) for role, m in sizes.items()} == {
        "gau": ("gau", 6, 1, 64),
        "mha1": ("mha", 3, 1, None),
        "mha4": ("mha", 3, 4, None),
    }
    assert {run.config.model.attention for run in runs} == {"kna:train_length=64", "qwen3"}
    assert len(make_plan("extrapolation").runs) == len(DEFAULT.remedies) * 2


def test_a_method_is_undone_and_changes_every_layer(tiny: Make) -> None:
    model = Trainer(dataclasses.replace(plan(tiny).runs[0].config)).trained.model
    specs = [module.spec for module in model.modules() if hasattr(module, "spec")]
    with changed(model, "ntk", 8, 32):
        assert all("NTK" in m.spec.position.formula() for m in model.modules() if hasattr(m, "spec"))
    assert [m.spec for m in model.modules() if hasattr(m, "spec")] == specs
    with pytest.raises(RefusedError, match="as trained"), changed(model, "ntk", 8, 32), changed(model, "pi", 8, 32):
        pass


@pytest.mark.parametrize(
    ("contexts", "error", "says"),
    [
        ({"test_lengths": (20,)}, InvalidValueError, "multiples of the training length 8, got 20"),
        ({"test_lengths": (4,)}, InvalidValueError, "multiples of the training length 8, got 4"),
        ({"posthoc": ("rerop",)}, UnknownNameError, "rerope"),
        ({"posthoc": ("rerope:window=8",)}, InvalidValueError, "under the training length"),
        ({"posthoc": ("ntk:windw=8",)}, QkeelError, "option of ntk"),
        ({"test_lengths": (8 * 10**6,)}, DataError, "shorter context"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    tiny: Make, contexts: dict[str, tuple[object, ...]], error: type[QkeelError], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan(tiny, contexts=dataclasses.replace(CONTEXT, **contexts))  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="at least 1 held-out"):
        LongContexts(sequences=0)
    with pytest.raises(UnknownNameError, match="kna"):
        plan(tiny, ("knaa",))
