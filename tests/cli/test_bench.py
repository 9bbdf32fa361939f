"""`qkeel bench`: what it prints, what it stores, and what it leaves alone when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkeel.cli import benching
from qkeel.cli.app import main
from qkeel.kernels.choice import stored
from qkeel.ops import KERNELS

CELL = {"device": "cpu", "dtype": "float32", "head_dim": 64, "form": "folded", "gradient": False, "statistics": "none"}
Capture = pytest.CaptureFixture[str]


def line(tokens: int, **ratios: float) -> dict[str, object]:
    rows = [{"case": name, "cpu_ms": [1.0, 2.0, 3.0], "ratio": [r, r, r]} for name, r in ratios.items()]
    return {"cell": {**CELL, "tokens": tokens}, "rows": rows, "order": sorted(ratios, key=lambda n: ratios[n])}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A measurement that takes no time, and a place for the table."""
    lines = [line(1, sdpa=1.0, chunked=0.5), line(128, sdpa=1.0, chunked=2.0), line(512)]
    monkeypatch.setattr(benching, "_measured", lambda size, device: iter(lines))
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "deep" / "t.json"))
    return tmp_path / "deep" / "t.json"


def test_every_kernel_that_takes_a_call_is_measured(capsys: Capture) -> None:
    assert main(["bench", "--size", "toy", "--json", "--device", "cpu"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["written"] is None
    assert {"device", "torch", "qkeel", "processor", "python"} <= set(said["about"])
    measured = {row["case"] for call in said["calls"] for row in call["rows"]}
    assert measured == set(KERNELS) - ({"native", "decode"} if os.environ.get("QKEEL_NATIVE") == "0" else set())
    assert {call["cell"]["form"] for call in said["calls"]} == {"folded", "masked", "capped", "distance"}
    assert all(call["rows"][0]["ratio"] == [1.0, 1.0, 1.0] for call in said["calls"] if call["rows"])


def test_the_table_is_shown_and_stored_only_on_request(table: Path, capsys: Capture) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out.splitlines()[0]
    assert "T 128   sdpa 2.00 ms  chunked 2.00 / 2.00 / 2.00  → sdpa" in out
    assert "T 512" not in out  # one kernel alone is no choice
    assert "--use" in out.splitlines()[-1]
    assert not table.parent.exists()
    assert main(["bench", "--use"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {table}"
    (orders,) = stored.read(table.read_text()).values()
    assert orders == {1: ("chunked", "sdpa"), 128: ("sdpa", "chunked")}


def test_a_new_table_keeps_what_it_did_not_measure(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table.parent.mkdir()
    table.write_text(json.dumps({"versions": stored.versions(), "orders": [
        {**CELL, "tokens": 128, "kernels": ["chunked"]},
        {**CELL, "form": "capped", "tokens": 128, "kernels": ["native", "chunked"]},
    ]}))  # fmt: skip
    assert main(["bench", "--use"]) == 0
    by_form = {asked[3]: orders[128] for asked, orders in stored.read(table.read_text()).items()}
    assert by_form == {"folded": ("sdpa", "chunked"), "capped": ("native", "chunked")}


def test_a_table_that_holds_no_more_is_replaced(table: Path) -> None:
    table.parent.mkdir()
    table.write_text('{"versions": {"torch": "1')
    assert main(["bench", "--use"]) == 0
    assert len(stored.read(table.read_text())) == 1


BAD = {
    "toy numbers": (["--size", "toy", "--use"], {}, "mean nothing"),
    "switched off": (["--use"], {stored.VARIABLE: "0"}, "switches tables off"),
    "a file in the way": (["--use"], {stored.VARIABLE: __file__ + "/t.json"}, "another place"),
    "size": (["--size", "tiny"], {}, "Choose from"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_before_anything_is_measured(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words, environment, said = BAD[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(benching, "_measured", lambda *_: pytest.fail("measured"))
    assert main(["bench", *words]) == 2
    out = capsys.readouterr()
    assert out.err.startswith("error: ")
    assert out.err.count("\n") == 1
    assert said in out.err


def test_a_read_only_cache_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(benching.tempfile, "TemporaryFile", refuse)
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "t.json"))
    assert main(["bench", "--use"]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(benching.sys, "executable", "false")
    assert main(["bench", "--size", "toy"]) == 1
    assert "ended with 1" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of a process are read from /proc")
def test_ctrl_c_ends_the_measuring_process_too_and_stores_nothing(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    command = [sys.executable, "-m", "qkeel", "bench", "--use", "--device", "cpu"]
    environment = {**os.environ, stored.VARIABLE: str(place), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as it:
        assert it.stdout is not None
        it.stdout.readline()  # the machine
        children, measuring = Path(f"/proc/{it.pid}/task/{it.pid}/children"), []
        while not measuring:
            time.sleep(0.05)
            measuring = children.read_text().split()
        it.send_signal(signal.SIGINT)
        _, told = it.communicate(timeout=60)
    assert it.returncode == 130
    assert told.startswith("interrupted. Go on with: qkeel bench --use")
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in measuring)
