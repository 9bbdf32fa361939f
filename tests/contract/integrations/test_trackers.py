"""Each tracker gets summaries, alarms and an end; each is named by a spec string; none is needed to import qkeel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor.samples import about, alarm, sample
from tests.each_row import each_row

from qkeel import watch
from qkeel.errors import (
    InvalidValueError,
    MissingLibraryError,
    QkeelError,
    UnknownNameError,
    needed,
)
from qkeel.integrations import SINKS, sink, sinks
from qkeel.monitor import RunDirectorySink, Sink

from . import fakes

OUTSIDE = {
    "mlflow": "mlflow",
    "tensorboard": "torch.utils.tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}


def used(one: Sink, *, complete: bool = True) -> None:
    one.open(about())
    for step in (0, 10):
        one.write(sample(step))
    one.write(sample(10, phase="eval"))
    one.alarm(alarm(step=10))
    one.close(complete)


def test_wandb_gets_a_run_of_its_own_and_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fakes.wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    used(sink("wandb:project=gpt,mode=offline"), complete=False)
    run: fakes.WandbRun = module.run
    assert module.asked == ("gpt", None, "offline")
    assert [(data["qkeel/step"], commit) for data, commit in run.logged] == [
        (0, True),
        (10, True),
        (10, True),
    ]
    assert run.logged[0][0]["attn/max_logit"] == 14.23
    assert "eval/attn/max_logit" in run.logged[2][0]
    heads = run.logged[0][0]["attn/heads/max_logit"]
    assert isinstance(heads, fakes.Histogram)
    assert heads.sequence == [1.0, 2.0, 3.0, 4.0, 14.23]
    assert run.axes["attn/*"] == "qkeel/step"
    assert run.alerts == [
        ("qkeel: ceiling 1000", str(alarm(step=10)), fakes.AlertLevel.WARN)
    ]
    assert run.config["qkeel"]["model"] == "Toy"
    assert run.tags == ("qkeel alarm: ceiling 1000",)
    assert run.finished == 1


def test_in_anothers_wandb_run_the_step_counter_stays_his_and_no_sample_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active = fakes.WandbRun()
    monkeypatch.setitem(sys.modules, "wandb", fakes.wandb(active))
    for commit, steps in (
        ("false", [0, 10, 30, 20, 40]),
        ("true", [0, 10, 20, 30, 40]),
    ):
        first = len(active.rows) - 1
        one = sink(f"wandb:commit={commit}")
        one.open(about())
        for step in (0, 10, 20, 30, 40):
            one.write(sample(step))
            if step in (0, 20):
                active.log({"loss": 1.0})
        if commit == "false":
            assert active.step == 2
        one.close(complete=True)
        rows = [row for row in active.rows[first:] if "qkeel/step" in row]
        assert sorted(row["qkeel/step"] for row in rows) == sorted(steps), commit
        assert sum("loss" in row for row in active.rows[first:]) == 2
    assert active.finished is None


def test_trackio_gets_steps_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    for active in (None, fakes.TrackioRun()):
        modules = fakes.trackio(active)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        used(sink("trackio:project=gpt"))
        run: fakes.TrackioRun = active or vars(modules["trackio"])["run"]
        assert [step for _, step in run.logged] == [0, 10, 10]
        assert isinstance(run.logged[0][0]["attn/heads/max_logit"], fakes.Histogram)
        assert run.alerts == [("qkeel: ceiling 1000", fakes.AlertLevel.WARN, 10)]
        assert run.finished == (active is None)
        if active is not None:
            active.log({"loss": 1.0})
            assert run.logged[-1][1] == 0  # the owner goes on counting his own steps


@pytest.mark.parametrize("active", [False, True])
def test_mlflow_ends_the_run_it_started_and_no_other(
    active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fakes.mlflow(active)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    used(sink("mlflow:experiment=e"))
    state = module.state
    assert [(step, run_id) for _, step, run_id in state.metrics] == [
        (0, "r1"),
        (10, "r1"),
        (10, "r1"),
    ]
    assert state.tags["r1", "qkeel.alarm.ceiling_1000"] == str(alarm(step=10))
    assert state.ended == (None if active else "FINISHED")
    assert state.experiment == (None if active else "number of e")


def test_tensorboard_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    used(sink(f"tensorboard:directory={tmp_path / 'tb'}"))
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    events.Reload()
    assert [(e.step, round(e.value, 2)) for e in events.Scalars("attn/max_logit")] == [
        (0, 14.23),
        (10, 14.23),
    ]
    assert [e.step for e in events.Scalars("eval/attn/layer_01/max_logit")] == [10]
    (first, second) = events.Histograms("attn/heads/max_logit")
    assert (first.step, second.step) == (0, 10)
    assert first.histogram_value.num == 5
    assert "alarms/ceiling 1000/text_summary" in events.Tags()["tensors"]


@each_row("name", SINKS)
def test_every_sink_takes_samples_alarms_and_an_end_and_has_its_row_in_the_docs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "trackers.md").read_text(
        encoding="utf-8"
    )
    assert f"\n| `{name}:" in page
    if name in OUTSIDE:  # each has a test of its own, with a stand-in of the library
        return
    monkeypatch.chdir(tmp_path)
    for complete in (True, False):
        try:
            used(sink(name), complete=complete)
        except MissingLibraryError:
            assert name == "parquet"


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_error_of_a_missing_library_has_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, OUTSIDE[name], None)
    with pytest.raises(MissingLibraryError, match=f"pip install {name}") as error:
        sink(name).open(about())
    assert isinstance(error.value, ImportError)
    assert isinstance(error.value, QkeelError)
    sink(name).close(complete=True)  # never opened: nothing to end
    broken = f"cannot be imported .*'NONE'.*: pip install --upgrade {name}"
    with (
        pytest.raises(MissingLibraryError, match=broken),
        needed("it", name),
    ):  # installed, but not as it should be
        from qkeel.errors import NONE  # noqa: F401  # type: ignore[attr-defined]


def test_sinks_are_named_by_spec_strings(tmp_path: Path) -> None:
    directory, log = sinks(f"directory:path={tmp_path / 'a'}+log:logger=mine")
    assert isinstance(directory, RunDirectorySink)
    assert directory.asked == tmp_path / "a"
    assert SINKS["log"].endswith(f":{type(log).__name__}")
    assert vars(sink("wandb:project=7"))["project"] == "7"
    with pytest.raises(UnknownNameError, match="Did you mean 'wandb'"):
        sink("wandbb")
    with pytest.raises(
        UnknownNameError,
        match=r"unknown option of wandb 'projct'\. Did you mean 'project'",
    ):
        sink("wandb:projct=x")
    with pytest.raises(InvalidValueError, match="expected one sink, got 2"):
        sink("log+log")
    with pytest.raises(
        UnknownNameError,
        match=r"unknown sink 'tensorbord'\. Did you mean 'tensorboard'.*write \./tensor",
    ):
        watch(torch.nn.Linear(1, 1), sinks="tensorbord")


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_a_trainers_door_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    outside: dict[str, Any] = {
        "huggingface": ["transformers"],
        "lightning": ["lightning", "lightning.pytorch"],
    }
    for module in outside[name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"qkeel.integrations.{name}", raising=False)
    with pytest.raises(MissingLibraryError, match="pip install"):
        importlib.import_module(f"qkeel.integrations.{name}")
