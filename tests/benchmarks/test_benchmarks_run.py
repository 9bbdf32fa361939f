"""Every benchmark runs at toy size, so that none rots. No test here looks at a time."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tests.quick import quick

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
# What has no benchmark of its own to run, and why.
NOT_RUN = {
    "__init__": "says what the package is",
    "hook_by_hand": "the peer of a measured step",
    "measure": "the harness that all share",
    "timing": "the clock that all share",
    "watch": "a test of its own, test_watch_runs.py",
}
SLOW = {"transformers_attention", "retrofit", "scan"}  # a second and more, at toy size
NEEDS_A_COMPILER = {
    "native",
    "attention",
    "decode",
    "modules",
    "transformers_attention",
}
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize(
    "name",
    quick(
        [name for name in MODULES if name not in NOT_RUN], lambda name: name not in SLOW
    ),
)
@pytest.mark.filterwarnings(
    "ignore"
)  # what peers and torch warn of is not looked at here
def test_a_benchmark_runs_at_toy_size(
    name,
    tmp_path,
    monkeypatch,
    capsys,
    request,
):
    if name in NEEDS_A_COMPILER:
        request.getfixturevalue("_compiler")
    # What a benchmark changes is put back afterwards.
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    monkeypatch.chdir(tmp_path)  # where one writes its results
    monkeypatch.setattr(sys, "argv", [name, "--toy"])
    importlib.import_module(f"benchmarks.{name}").main()
    assert len(capsys.readouterr().out.splitlines()) >= 3
    for path in tmp_path.rglob("*.json"):
        assert json.loads(path.read_text())["about"]["torch"], (
            "results say with what they were measured"
        )
