"""The Triton kernels run here in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy
import pytest
import torch
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
def _interpreter() -> Iterator[None]:
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    def patch(package: Any, *how: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):  # it is not where this is a call inside another
                interpreter._patch_attr(package, name, member, *how)

    # At each call of a function Triton asks each member of the language whether it is a builtin: a quarter of the time.
    with pytest.MonkeyPatch.context() as once:
        once.setattr(interpreter, "_patch_builtin", patch)
        yield


@pytest.fixture(autouse=True)
def _no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for CUDA's here, which the kernels compiled for CPUs never see."""
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    monkeypatch.setenv("QKEEL_TRITON", "write")


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CPU tensors take the way of CUDA tensors; the dtypes of the passes over q and k that were made there."""
    monkeypatch.setattr(available, "usable", lambda device: available.loaded())
    assert all(available.trusted(family, torch.device("cpu")) for family in ("statistics", "sampled statistics"))
    seen: list[Any] = []
    from qkeel.kernels.triton import statistics
    from qkeel.kernels.triton import statistics as sampled

    def counted(inner: Any) -> Any:
        def call(q: Tensor, k: Tensor, scale: float, **how: Any) -> Any:
            seen.append(q.dtype)
            return inner(q, k, scale, **how)

        return call

    for module, name in ((statistics, "rows_of"), (sampled, "extremes")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return seen
