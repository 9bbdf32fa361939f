"""Every benchmark runs at toy size, so that none rots. No test here looks at a time."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
# What has no benchmark of its own to run, and why.
NOT_RUN = {
    "__init__": "says what the package is",
    "measure": "the timing that all share",
    "modules": "tables of `python -m benchmarks`",
    "latents": "tables of `python -m benchmarks`",
    "gpu": "a test of its own, tests/kernels/triton_kernels/test_loading.py",
    "roofline_chart": "draws results of `python -m benchmarks.roofline`; its own test draws them again",
    "remedy_charts": "draws charts from a finished study, measures nothing",
}
NEEDS_A_COMPILER = {"native", "attention", "attention_backward", "decode", "adamw"}
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NOT_RUN])
@pytest.mark.filterwarnings("ignore")  # what peers and torch warn of is not looked at here
def test_a_benchmark_runs_at_toy_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS_A_COMPILER and shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setenv("QKEEL_NATIVE", "0")  # what a benchmark changes is put back afterwards
    monkeypatch.chdir(tmp_path)  # where one writes its results
    monkeypatch.setattr(sys, "argv", [name, "--toy"])
    importlib.import_module(f"benchmarks.{name}").main()
    assert len(capsys.readouterr().out.splitlines()) >= 3
    for path in tmp_path.rglob("*.json"):
        assert json.loads(path.read_text())["about"]["torch"], "results say with what they were measured"


@pytest.mark.parametrize("name", NOT_RUN)
def test_every_exception_is_still_one(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert not functions or NOT_RUN[name].startswith(("draws", "a test of its own")), (
        "it can run by itself: take it off the list"
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_restarts_as_itself(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    for module in re.findall(r"settle\((.*?)\)", text):
        assert module == ("" if name == "__main__" else f'module="benchmarks.{name}"')
    inside = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert not any("settle(" in function for function in inside), "a caller of main() would be replaced by it"
