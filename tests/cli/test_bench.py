"""`qkeel bench`: what it prints, and what it leaves behind when something goes wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import pytest

from qkeel.cli.app import main
from qkeel.cli.bench import (
    HEAD_DIMS,
    MALLOC,
    SIZES,
    TOKENS,
    BenchRow,
    Cell,
    call_line,
    fastest_first,
    grid,
    interleave,
    processor_ms,
    settle,
)
from qkeel.ops import KERNELS

Capture = pytest.CaptureFixture[str]


def test_every_kernel_that_supports_a_call_is_measured(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**MALLOC, "OMP_NUM_THREADS": "1"}.items():  # else the process would start again
        monkeypatch.setenv(name, value)
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
        rows = [BenchRow("sdpa", [1.0, 2.0, 3.0], [1.0] * 3), BenchRow("chunked", [1.0] * 3, [ratio] * 3)]
        line = call_line(cell, rows)
        assert line.startswith("folded   float32  d 64  forward   statistics none  T 128   sdpa 2.00 ms")
        assert line.endswith(f"chunked {ratio:.2f} / {ratio:.2f} / {ratio:.2f}  → {fastest}")


def test_every_case_is_called_once_a_round_in_an_order_that_turns_round() -> None:
    called: list[str] = []
    cases = {name: (lambda name=name: called.append(name)) for name in "abc"}
    interleave(cases, "a", rounds=2, calls=2, warmup=1)
    assert "".join(called) == "abc" + "aabbcc" + "ccbbaa"


def test_a_ratio_is_that_of_its_own_round() -> None:
    ticks = iter([1.0, 3.0, 8.0, 2.0])  # a and b, then b and a

    def clock(case: Callable[[], object], calls: int) -> float:
        return next(ticks)

    a, b = interleave({"a": lambda: None, "b": lambda: None}, "a", rounds=2, warmup=0, clock=clock)
    assert (a.times, a.ratios) == ([1.0, 2.0], [1.0, 1.0])
    assert (b.times, b.ratios) == ([3.0, 8.0], [3.0, 4.0])
    assert b.ratio == 3.5
    assert b.as_dict() == {"case": "b", "cpu_ms": [3.0, 5.5, 8.0], "ratio": [3.0, 3.5, 4.0]}


def test_the_clock_of_a_processor_counts_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1.5])
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    assert processor_ms(lambda: None, calls=5) == 100.0


def test_the_fastest_is_first() -> None:
    rows = [
        BenchRow("a", [1.0] * 3, [1.0] * 3),
        BenchRow("b", [1.0] * 3, [0.5, 0.6, 9.0]),
        BenchRow("c", [1.0] * 3, [2.0] * 3),
    ]
    assert fastest_first(rows) == ("b", "a", "c")


def test_the_full_grid_has_every_combination_once() -> None:
    cells = list(grid(SIZES["full"], "cpu"))
    assert len(cells) == len(set(cells)) == 2 * 2 * 4 * 2 * (2 * len(TOKENS) - 1)
    assert {cell.head_dim for cell in cells} == set(HEAD_DIMS)
    assert not [cell for cell in cells if cell.gradient and cell.tokens == 1]  # decoding


def test_a_process_starts_steady_or_starts_again_by_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "some.module", "--toy"])
    for name, value in {**MALLOC, "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    settle(3)
    assert started == []
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    settle(3)
    assert [words[1:] for words in started] == [["-m", "some.module", "--toy"]]
