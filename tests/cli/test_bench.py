"""`qkeel bench`: what it prints, and what it leaves behind when something goes wrong."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkeel.bench.__main__ import call_line
from qkeel.bench.kernels import Cell
from qkeel.bench.measure import Row
from qkeel.cli.app import main
from qkeel.ops import KERNELS

Capture = pytest.CaptureFixture[str]


def test_every_kernel_that_supports_a_call_is_measured(capfd: Capture) -> None:
    assert main(["bench", "--size", "toy", "--json", "--device", "cpu"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {"device", "torch", "qkeel", "processor", "python"} <= set(found["about"])
    measured = {row["case"] for call in found["calls"] for row in call["rows"]}
    compiled = {"native", "decode"} if os.environ.get("QKEEL_NATIVE") == "0" else set()
    assert measured == set(KERNELS) - compiled - {"flex"}  # on a GPU only
    assert {call["cell"]["form"] for call in found["calls"]} == {"folded", "masked", "capped", "distance"}
    assert {call["cell"]["tokens"] for call in found["calls"]} == {1, 2, 8, 32}  # those that were measured
    assert all(call["rows"][0]["ratio"] == [1.0, 1.0, 1.0] for call in found["calls"] if call["rows"])


def test_one_line_says_the_call_the_times_and_the_fastest_kernel() -> None:
    cell = Cell(
        device="cpu", dtype="float32", head_dim=64, form="folded", gradient=False, statistics="none", tokens=128
    )
    for ratio, fastest in ((0.5, "chunked"), (2.0, "sdpa")):
        rows = [Row("sdpa", [1.0, 2.0, 3.0], [1.0] * 3), Row("chunked", [1.0] * 3, [ratio] * 3)]
        line = call_line(cell, rows)
        assert line.startswith("folded   float32  d 64  forward   statistics none  T 128   sdpa 2.00 ms")
        assert line.endswith(f"chunked {ratio:.2f} / {ratio:.2f} / {ratio:.2f}  → {fastest}")


@pytest.mark.parametrize(("words", "expected"), [(["--use"], "--use"), (["--size", "tiny"], "Choose from")])
def test_bad_input_is_one_clear_error(words: list[str], expected: str, capsys: Capture) -> None:
    assert main(["bench", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: ")
    assert out.err.count("\n") == 1
    assert expected in out.err


def test_a_process_that_fails_is_one_error(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert main(["bench", "--size", "toy"]) == 1
    assert "ended with exit code 1" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of a process are read from /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_the_command_ends_the_measuring_process_too(sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "qkeel", "bench", "--device", "cpu"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # What a shell starts in the background ignores Ctrl-C, and so do its children; here the command hears it.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, preexec_fn=heard, **pipes) as it:  # type: ignore[call-overload]
        assert it.stdout is not None
        it.stdout.readline()  # the machine
        children, measuring = Path(f"/proc/{it.pid}/task/{it.pid}/children"), []
        while not measuring:
            time.sleep(0.05)
            measuring = children.read_text().split()
        it.send_signal(sent)
        _, errors = it.communicate(timeout=300)  # the measuring process has the same pipes, so they end with it
    assert it.returncode == (130 if sent is signal.SIGINT else -signal.SIGKILL)
    assert sent is signal.SIGKILL or errors.startswith("interrupted. Go on with: qkeel bench --device")
    assert "Traceback" not in errors
    # A process that ends closes its pipes first, so some of them may be there for a moment longer.
    for _ in range(600):
        if not (left := [pid for pid in measuring if _runs(pid)]):
            break
        time.sleep(0.1)
    assert not left


def _runs(pid: str) -> bool:
    """Returns whether the process is there and no zombie, which one is that its parent did not wait for."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
