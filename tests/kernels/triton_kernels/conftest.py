"""The Triton kernels run here in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version
from typing import Any

import numpy
import pytest
from torch import Tensor

from qkeel.kernels.triton import available


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


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CPU tensors take the way of CUDA tensors; the dtypes of the passes over q and k that were made there."""
    monkeypatch.setattr(available, "usable", lambda device: available.loaded())
    seen: list[Any] = []
    from qkeel.kernels.triton import sampled, statistics

    def counted(inner: Any) -> Any:
        def call(q: Tensor, k: Tensor, scale: float, **how: Any) -> Any:
            seen.append(q.dtype)
            return inner(q, k, scale, **how)

        return call

    for module, name in ((statistics, "rows_of"), (sampled, "extremes")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return seen
