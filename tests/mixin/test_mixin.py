"""A model of transformers with a remedy passes the tests of transformers that it passes without.

The tests are in the source archive of transformers on the package index, not in its wheel, and are read from there:

    python -m pip download --no-deps --no-build-isolation --no-binary :all: transformers==5.23.0 -d SOURCE
    tar xzf SOURCE/transformers-5.23.0.tar.gz -C SOURCE
    python -m pip install --target SOURCE/site parameterized
    QKEEL_TRANSFORMERS_SOURCE=SOURCE/transformers-5.23.0 PYTHONPATH=SOURCE/site pytest -m slow tests/mixin
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Asks for transformers' tests of generation beside it, which the archive does not have.
ABSENT = "test_generation_tester_mixin_inheritance"


def _source() -> str:
    """Where the source archive is unpacked; skips where it is not, or is of another version."""
    version = importlib.metadata.version("transformers")
    source = os.environ.get("QKEEL_TRANSFORMERS_SOURCE", "")
    if not source or importlib.util.find_spec("parameterized") is None:
        pytest.skip(f"set QKEEL_TRANSFORMERS_SOURCE to the source archive of transformers {version}: see {__file__}")
    found = (Path(source) / "PKG-INFO").read_text().partition("\nVersion: ")[2].partition("\n")[0]
    if found != version:
        pytest.skip(f"QKEEL_TRANSFORMERS_SOURCE holds transformers {found}, installed is {version}")
    return source


@functools.cache
def outcomes(model: str, remedy: str, folder: Path) -> dict[str, str]:
    """What became of each of transformers' tests: passed, failed, skipped."""
    report, settings = folder / f"{model}-{remedy}.xml", folder / "empty.ini"
    settings.write_text("")  # the warnings of transformers' own tests are not ours
    root = HERE.parents[1]
    options = ["-c", str(settings), "--rootdir", str(root), "-p", "no:cacheprovider", "-W", "ignore"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--junitxml", str(report), f"{HERE / 'classes.py'}::{model}"],
        env={**os.environ, "QKEEL_REMEDIES": remedy, "HF_HUB_OFFLINE": "1"},
        cwd=root,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        name, states = str(case.get("name")), {child.tag for child in case}
        state = "failed" if states & {"failure", "error"} else "skipped" if "skipped" in states else "passed"
        found[name] = "failed" if "failed" in (state, found.get(name)) else state
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixin")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("remedy", ["qk_norm", "softcap", "sink"])
@pytest.mark.parametrize("model", ["Llama", "Qwen2", "GPT2"])
def test_the_tests_that_pass_with_a_remedy_are_those_that_pass_without(model: str, remedy: str, folder: Path) -> None:
    _source()
    without, treated = outcomes(model, "none", folder), outcomes(model, remedy, folder)
    assert [name for name, state in without.items() if state == "failed"] == [ABSENT]
    assert sum(state == "passed" for state in without.values()) > 90
    assert {n: s for n, s in treated.items() if without[n] != s} == {}
