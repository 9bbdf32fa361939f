"""The compiled kernels are on for the tests in here, and compiled once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qkeel.kernels.native import build, ready


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")


@pytest.fixture
def library(_on: None) -> Path:
    """The compiled library, loaded."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert ready()
    return build.compiled("norm_rope")
