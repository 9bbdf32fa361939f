"""The Triton kernels run here in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version

import numpy
import pytest


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton cannot be imported here"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "these tests are for Triton's interpreter (TRITON_INTERPRET=1); on a GPU run tests/gpu"
    old = tuple(int(n) for n in version("triton").split(".")[:2]) < (3, 8)
    if old and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return "the interpreter of Triton before 3.8 cannot run a loop with numpy 2.4"
    return None


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for CUDA's here, which the kernels compiled for CPUs never see."""
    monkeypatch.setenv("QKEEL_NATIVE", "0")
