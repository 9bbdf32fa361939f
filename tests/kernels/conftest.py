"""What tests of kernels share."""

import functools
import importlib.util
import inspect
import os
from importlib.metadata import version

import numpy
import pytest
import torch

from qkeel.kernels.native import build, ready

# Where tests are run for the registers of another processor: more options of the compiler, so other libraries.
build.FLAGS = (*build.FLAGS, *os.environ.get("QKEEL_TEST_FLAGS", "").split())


@pytest.fixture
def _poisoned():
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _on(monkeypatch):
    monkeypatch.setenv("QKEEL_NATIVE", "1")


@pytest.fixture
def library(_compiler):
    """The compiled kernels are on; their library, loaded."""
    assert ready()
    return build.compiled()


def _why_no_triton():
    if importlib.util.find_spec("triton") is None:
        return "Triton cannot be imported here"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "these tests are for Triton's interpreter (TRITON_INTERPRET=1); on a GPU run tests/gpu"
    old = tuple(int(n) for n in version("triton").split(".")[:2]) < (3, 8)
    if old and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return "the interpreter of Triton before 3.8 cannot run a loop with numpy 2.4"
    return None


@pytest.fixture(scope="session")
def _interpreter():
    reason = _why_no_triton()
    if reason is not None:
        pytest.skip(reason)
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package):
        return [
            name
            for name, member in inspect.getmembers(package)
            if interpreter.tl.core.is_builtin(member)
        ]

    def patch(package, *how):
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
def _triton(_interpreter, monkeypatch):
    """The Triton kernels run in Triton's interpreter: CPU tensors stand for CUDA's, which no compiled kernel sees."""
    monkeypatch.setenv("QKEEL_NATIVE", "0")
