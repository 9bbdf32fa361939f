"""What tests of kernels share."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from qkeel.kernels.native import build, ready

# Where tests are run for the registers of another processor: more options of the compiler, so other libraries.
build.FLAGS = (*build.FLAGS, *os.environ.get("QKEEL_TEST_FLAGS", "").split())  # type: ignore[misc]


@pytest.fixture
def _poisoned() -> Iterator[None]:
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")


@pytest.fixture
def library(_compiler: None) -> Path:
    """The compiled kernels are on; their library, loaded."""
    assert ready()
    return build.compiled()


def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton cannot be imported here"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "these tests are for Triton's interpreter (TRITON_INTERPRET=1); on a GPU run tests/gpu"
    old = tuple(int(n) for n in version("triton").split(".")[:2]) < (3, 8)
    if old and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return "the interpreter of Triton before 3.8 cannot run a loop with numpy 2.4"
    return None


@pytest.fixture(scope="session")
def _interpreter() -> Iterator[None]:
    reason = _why_no_triton()
    if reason is not None:
        pytest.skip(reason)
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [
            name
            for name, member in inspect.getmembers(package)
            if interpreter.tl.core.is_builtin(member)
        ]

    def patch(package: Any, *how: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            # It is not where this is a call inside another.
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *how)

    # At each call of a function Triton asks each member of the language whether it is a builtin: a quarter of the time.
    with pytest.MonkeyPatch.context() as once:
        once.setattr(interpreter, "_patch_builtin", patch)
        yield


@pytest.fixture
def _triton(_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels run in Triton's interpreter: CPU tensors stand for CUDA's, which no compiled kernel sees."""
    monkeypatch.setenv("QKEEL_NATIVE", "0")
