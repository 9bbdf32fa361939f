"""What a sink writes can be read: at the end, at any instant before it, and never over what was there."""

import logging

import numpy as np
import pytest
from tests.training import sgd
from torch import nn

from qkeel import watch
from qkeel.errors import InvalidTypeError, RunDirectoryError
from qkeel.monitor import LoggingSink, RunDirectorySink, Severity
from qkeel.records import HEAD_FIELDS, RunDirectory, RunStatus, disk, fresh_directory

from .samples import LAYERS, about, alarm, sample


def opened(path, **more):
    sink = RunDirectorySink(path)
    sink.open({**about(), **more})
    return sink


def test_a_run_comes_back_as_it_was_written(tmp_path):
    sink = opened(tmp_path / "watch")
    for step in (0, 10, 20):
        sink.write(sample(step, max_logit=[[1.0, 2.0, step], [-np.inf, 5.0]]))
    sink.write(sample(20, phase="eval"))
    assert (tmp_path / "watch" / "metrics.jsonl").read_text().count(
        '"step": 10,'
    ) == 1  # a whole number, not 10.0
    sink.alarm(alarm(step=20))
    sink.close(complete=True)
    run = RunDirectory(tmp_path / "watch")
    assert run.status is RunStatus.DONE
    assert run.config()["kind"] == "watch"
    assert run.config()["sites"] == about()["sites"]
    assert run.env() == {"versions": about()["versions"], "command": "python train.py"}
    assert [record["step"] for record in run.metrics()] == [0, 10, 20]
    heads = run.heads()
    assert heads.layers == LAYERS
    assert set(heads.values) == set(HEAD_FIELDS)
    expected = [[1.0, 2.0, 20.0], [-np.inf, 5.0, np.nan]]
    assert np.array_equal(heads.values["max_logit"][-1], expected, equal_nan=True)
    assert np.isnan(heads.values["qk_spectral_norm"]).all()
    assert [record["step"] for record in run.eval_metrics()] == [20]
    assert run.eval_heads().steps.tolist() == [20]
    event = run.events()[0]
    assert (event["event"], event["severity"], event["layer"], event["head"]) == (
        "alarm",
        "alarm",
        "h.1.attn",
        1,
    )
    assert event["remedy"] == "qkeel.apply(...)"
    summary = run.summary()
    assert (
        summary["steps"],
        summary["samples"],
        summary["max_logit"],
        summary["alarms"],
    ) == (20, 3, 20.0, 1)


def test_nothing_on_disk_is_written_over(tmp_path):
    paths = [opened(tmp_path / "watch").path for _ in range(3)]
    assert paths == [tmp_path / "watch", tmp_path / "watch-2", tmp_path / "watch-3"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert opened(tmp_path / "mine").path == tmp_path / "mine-2"
    (tmp_path / "file").write_text("x")
    assert opened(tmp_path / "file").path == tmp_path / "file-2"
    assert opened(tmp_path / "mine").path == tmp_path / "mine-3"
    (tmp_path / "empty").mkdir()
    assert opened(tmp_path / "empty").path == tmp_path / "empty"


def test_a_field_that_turns_up_late_keeps_the_records_whole_and_is_told_once(
    tmp_path,
):
    sink = opened(tmp_path / "watch", fields=["max_logit"])
    sink.write(sample(0))
    for step in (1, 2):
        sink.write(sample(step, cos_max=[[0.1] * 3, [0.2] * 2]))
    run = RunDirectory(tmp_path / "watch")
    assert run.heads().steps.tolist() == [0, 1, 2]
    texts = [event["event"] for event in run.events()]
    assert sorted(text.split()[0] for text in texts) == ["cos_max", "entropy"]


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(
        InvalidTypeError, match="expected a path for the records, got int"
    ):
        RunDirectorySink(3)
    with pytest.raises(RunDirectoryError, match="call open"):
        RunDirectorySink(tmp_path / "watch").write(sample(0))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="Choose a writable directory"):
        opened(tmp_path / "file" / "watch")
    RunDirectorySink(tmp_path / "never").close(complete=True)
    assert not (tmp_path / "never").exists()


def test_the_log_gets_samples_and_alarms_by_severity(
    caplog,
):
    sink = LoggingSink("qkeel.test")
    with caplog.at_level(logging.INFO, logger="qkeel.test"):
        sink.open(about())
        sink.write(sample(5))
        for severity in Severity:
            sink.alarm(alarm(severity))
        sink.close(complete=True)
    assert [record.levelname for record in caplog.records] == [
        "INFO",
        "INFO",
        "INFO",
        "WARNING",
        "ERROR",
    ]
    assert caplog.messages[0] == "watching 2 attention layers of Toy"
    assert "max logit 14.2 (h.1.attn head 1)" in caplog.messages[1]


def test_a_directory_is_claimed_by_its_first_file(tmp_path):
    assert [
        fresh_directory(tmp_path / "run", first="events.jsonl").name for _ in range(2)
    ] == ["run", "run-2"]
    (tmp_path / "empty").mkdir()
    assert fresh_directory(tmp_path / "empty", first="events.jsonl").name == "empty"
    assert not disk.create(tmp_path / "empty" / "events.jsonl")


def test_watching_does_not_begin_where_its_directory_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = nn.Linear(2, 2)
    optimizer = sgd(model, lr=1e-3)
    with pytest.raises(RunDirectoryError, match="cannot create"):
        watch(model, optimizer, sinks=[tmp_path / "file" / "run"])
    watch(model, optimizer, sinks=[tmp_path / "file"]).close()
    assert (tmp_path / "file").read_text() == "in the way"
