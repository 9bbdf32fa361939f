"""Tables of records: the same rows in numpy, pandas, CSV and Parquet; figures; short texts."""

import csv
import sys

import numpy as np
import pytest
from monitor.samples import about, sample

import qkeel
from qkeel.cli.audit import export
from qkeel.errors import (
    MissingLibraryError,
    RunDirectoryError,
    UnknownNameError,
)
from qkeel.frames.tables import draw_heads, draw_lines
from qkeel.monitor import History, RunDirectorySink


@pytest.fixture
def run(tmp_path):
    """A run of three records, with a layer of three heads and one of two."""
    sink = RunDirectorySink(tmp_path / "run")
    sink.open(about())
    for step in (0, 10, 20):
        sink.write(sample(step, max_logit=[[1.0, 2.0, step], [-np.inf, 5.0]]))
    sink.write(sample(20, phase="eval"))
    sink.close(complete=True)
    return tmp_path / "run"


def test_a_run_is_read_as_tables(run):
    loaded = qkeel.load(run)
    assert repr(loaded) == f"<Run {run}: Toy, 3 records to step 20, done>"
    assert loaded.config["optimizer"] == "AdamW"
    assert loaded.steps["step"].tolist() == [0, 10, 20]
    assert loaded.steps["train_loss"].tolist() == [2.5] * 3
    heads = loaded.heads
    assert list(heads.columns) == [
        "step",
        "layer",
        "head",
        "max_logit",
        "entropy",
    ]  # what was measured
    assert len(heads) == 3 * 5  # and of the heads that there are
    rows = list(zip(*heads.columns.values(), strict=True))
    assert rows[7] == (10, "h.0.attn", 2, 10.0, 4.0)
    assert rows[8] == (10, "h.1.attn", 0, -np.inf, 1.0)
    assert loaded.eval_heads["step"].tolist() == [20] * 5
    assert loaded.history.layers == ("h.0.attn", "h.1.attn")
    with pytest.raises(
        RunDirectoryError,
        match=r"has no config\.json of a run\. Give a directory that qkeel\.watch",
    ):
        qkeel.load(run.parent)
    with pytest.raises(
        UnknownNameError, match=r"unknown column 'entropi'\. Did you mean 'entropy'"
    ):
        heads["entropi"]


def test_pandas_has_the_same_rows(run):
    pytest.importorskip("pandas")
    heads = qkeel.load(run).heads
    history = History.read(qkeel.load(run).directory)
    for table in (heads.to_pandas(), history.to_pandas()):
        assert list(table.columns) == list(heads.columns)
        assert table["layer"].to_list() == heads["layer"].tolist()
        assert table["max_logit"].to_list() == heads["max_logit"].tolist()
    assert history.to_pandas("steps")["step"].to_list() == [0, 10, 20]


def test_what_is_exported_is_what_is_loaded(run, tmp_path, capsys):
    heads = qkeel.load(run).heads
    assert export(run, to="csv", out=tmp_path / "out") == 0
    names = ["steps", "heads", "eval_steps", "eval_heads"]
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / f"{name}.csv") for name in names
    ]
    with open(tmp_path / "out" / "heads.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["max_logit"]) for row in rows] == heads["max_logit"].tolist()
    assert [row["layer"] for row in rows] == heads["layer"].tolist()
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(RunDirectoryError, match="is not empty"):
        export(run, to="parquet", out=tmp_path / "out")
    assert export(run, to="parquet", out=tmp_path / "out2") == 0
    table = parquet.read_table(tmp_path / "out2" / "heads.parquet").to_pydict()
    assert table == {name: values.tolist() for name, values in heads.columns.items()}


def test_the_error_of_a_missing_library_names_it(run, tmp_path, monkeypatch):
    for name in ("pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    loaded = qkeel.load(run)
    calls = [
        (loaded.heads.to_pandas, "pandas"),
        (lambda: export(run, to="parquet", out=tmp_path / "out"), "pyarrow"),
    ]
    for call, library in calls:
        with pytest.raises(MissingLibraryError, match=f"pip install {library}"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("least", "most", "scale"),
    [(1, 31, "log"), (2, 60, "linear"), (0, 31, "linear"), (-3, 2, "linear")],
)
def test_figures_have_the_scale_of_what_they_show(least, most, scale):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    steps, names = np.arange(2), [f"layer {i}" for i in range(24)]
    logits = np.linspace(least, most, 48)
    for n in (8, 9):
        ax = Figure().subplots()
        draw_lines(ax, steps, logits[: 2 * n].reshape(2, n), names[:n], "max logit")
        assert (ax.get_legend() is None) == (n == 9)
    ax = Figure().subplots()
    draw_lines(ax, steps, logits.reshape(2, 24), names, "max logit")
    assert ax.get_yscale() == scale
    ax = Figure().subplots()
    draw_heads(ax, logits.reshape(24, 2), names, "max logit")
    assert ax.get_yticklabels()[-1].get_text() == "layer 23"
    norm = ax.images[0].norm
    assert (norm.vmin, norm.vmax) == (least, most)
