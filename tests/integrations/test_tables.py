"""CSV files: a row of each step, head and alarm, in the folder that was current when the sink was made."""

import csv

import pytest
from monitor.samples import about, alarm, sample

from qkeel.integrations.trackers import CSVSink
from qkeel.monitor import Severity


def test_every_number_has_a_row_and_a_column_of_later_is_left_out_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    sink = CSVSink("tables")
    sink.require()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    sink.write(sample(0))  # nothing is open yet
    sink.open({**about(), "fields": ["max_logit", "entropy"]})
    sink.write(sample(0))
    for step in (10, 20):
        sink.write(sample(step, min_logit=[[-1.0, -2.0, -3.0], [-4.0, -5.0]]))
    sink.write(sample(20, phase="eval"))
    sink.alarm(alarm(step=20))
    sink.alarm(alarm(Severity.NOTICE, step=30, layer=None, head=None))
    sink.close(True)
    tables = {}
    for path in (tmp_path / "tables").iterdir():
        with open(path, newline="", encoding="utf-8") as file:
            tables[path.stem] = list(csv.DictReader(file))
    assert {name: len(rows) for name, rows in tables.items()} == {
        "steps": 3,
        "heads": 15,
        "eval_steps": 1,
        "eval_heads": 5,
        "alarms": 2,
    }
    assert [row["step"] for row in tables["steps"]] == ["0", "10", "20"]
    assert float(tables["steps"][2]["train_loss"]) == 2.5
    last = tables["heads"][-1]
    assert (last["step"], last["layer"], last["head"]) == ("20", "h.1.attn", "1")
    assert float(last["max_logit"]) == pytest.approx(14.23)
    assert "min_logit" not in last
    assert caplog.text.count("heads.csv has no column for min_logit") == 1
    assert [
        (row["step"], row["severity"], row["layer"], row["head"], float(row["value"]))
        for row in tables["alarms"]
    ] == [("20", "alarm", "h.1.attn", "1", 1200.0), ("30", "notice", "", "-1", 1200.0)]
    assert tables["alarms"][0]["rule"] == "ceiling 1000"
    assert not [*(tmp_path / "elsewhere").iterdir()]
