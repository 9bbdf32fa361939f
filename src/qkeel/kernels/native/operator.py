"""The mechanism of every compiled operator: built, loaded and described to torch's compiler on first use."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import caution
from qkeel.kernels.native.build import opened
from qkeel.patching.compiler_state import constant_when_compiled, transformed

STORED = (torch.float32, torch.bfloat16, torch.float16)  # what operators read; they compute in float32
WIDEST = 1024  # WIDEST in the sources
_LOADING = threading.Lock()


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OperatorSource:
    """The operators of one C++ source, `source/NAME.cpp`, which defines them as torch.ops.qkeel_native.OPERATOR.

    `shapes` has, for each operator, a function of its arguments that returns empty tensors like its results: torch's
    compiler calls these instead of the operators.
    """

    name: str
    shapes: Mapping[str, Callable[..., object]]

    @constant_when_compiled
    def ready(self) -> bool:
        """Returns whether the operators can be used here and now; the first call may compile.

        Not where QKEEL_NATIVE=0 switches them off, where they cannot be compiled, or under a torch.func transform, an
        export or a trace. A failure is reported once; from then on torch computes, as with QKEEL_NATIVE=0.
        """
        if _switched_off() or transformed():
            return False
        with _LOADING:
            return _loaded(self) is not None

    def functions(self) -> ModuleType | None:
        """Returns the source's Python functions, which call no dispatcher of torch; None where there are none.

        They check themselves what is under way, and leave to the operators what they cannot compute.
        """
        if _switched_off():
            return None
        with _LOADING:
            library = _loaded(self)
            return None if library is None else _functions(self.name, library)


def is_plain(x: Tensor) -> bool:
    """Returns whether it is a tensor of torch's own: a subclass has operators of its own."""
    return type(x) in (Tensor, nn.Parameter)


def reads(x: Tensor) -> bool:
    """Returns whether operators read it: a plain tensor of STORED, rows of a multiple of 8 numbers, 1,024 at most."""
    return is_plain(x) and x.dtype in STORED and x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= WIDEST and x.numel() > 0


def _switched_off() -> bool:
    return os.environ.get("QKEEL_NATIVE", "1") == "0" or sys.platform != "linux"


@functools.cache
def _functions(name: str, library: str) -> ModuleType | None:
    found = importlib.machinery.ExtensionFileLoader(name, library)
    try:
        return importlib.util.module_from_spec(importlib.util.spec_from_loader(name, found))  # type: ignore[arg-type]
    except ImportError:  # compiled where Python's headers are missing
        return None


@functools.cache
def _loaded(source: OperatorSource) -> str | None:
    """Loads the library and returns the path of what was loaded; None, and a warning, where there is none."""
    try:
        try:
            library = _load(opened(source.name))
        except ImportError:  # sound, but not for this machine
            library = _load(opened(source.name, from_scratch=True))
        for operator, shapes in source.shapes.items():
            torch.library.register_fake(f"qkeel_native::{operator}", shapes)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _tell(source.name, " ".join(str(error).split()))
        return None
    return library


def _load(file: int) -> str:
    """Loads an open file and returns its path in this process, under which the file stays open.

    torch.ops.load_library would go back to the file's name, where another file may lie by now. A loader tells
    libraries apart by their paths, so that the descriptor of a loaded one must not be given to another.
    """
    path = f"/proc/self/fd/{file}"
    try:
        ctypes.CDLL(path)
    except OSError as error:
        os.close(file)
        raise ImportError(str(error)) from error
    return path


@functools.cache
def _reasons() -> set[str]:
    return set()


def _tell(name: str, reason: str) -> None:
    """Says why, once for all sources that it keeps from being loaded."""
    if reason not in _reasons():
        _reasons().add(reason)
        caution(f"qkeel computes without its compiled {name}: {reason}. QKEEL_NATIVE=0 silences this.")
