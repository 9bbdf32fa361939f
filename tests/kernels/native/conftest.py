"""The compiled kernels are on for the tests in here, and compiled once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qkeel.kernels.native import build, norm_rope_ready

# Where these tests are run for the registers of another processor: more options of the compiler, so other libraries.
build.FLAGS = (*build.FLAGS, *os.environ.get("QKEEL_TEST_FLAGS", "").split())  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")


@pytest.fixture
def library(_on: None) -> Path:
    """The compiled library, loaded."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert norm_rope_ready()
    return build.compiled("norm_rope")


@pytest.fixture
def assert_threads_change_no_bit() -> Callable[[Callable[[], Sequence[Tensor]]], None]:
    """Runs something on 1, 2 and 8 threads and compares."""

    def check(run: Callable[[], Sequence[Tensor]]) -> None:
        one = run()
        try:
            for threads in (2, 8):
                torch.set_num_threads(threads)
                assert all(map(torch.equal, one, run())), f"{threads} threads"
        finally:
            torch.set_num_threads(1)

    return check
