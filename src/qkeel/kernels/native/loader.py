"""Loads compiled operators when first wanted, and says whether there are any."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import torch
from torch._C._functorch import get_interpreter_stack

from qkeel.errors import caution
from qkeel.kernels.native.build import compiled

_LOADING = threading.Lock()


def transformed() -> bool:
    """Whether a torch.func transform, export or trace is under way."""
    # What is exported or traced is run elsewhere, by programs that know no operators of ours.
    return get_interpreter_stack() is not None or torch.compiler.is_exporting() or torch.jit.is_tracing()


def usable(name: str, register: Callable[[], None]) -> bool:
    """Whether the operators of the source `name`.cpp can be used here and now.

    Not where they are switched off, cannot be compiled, or a torch.func transform, export or trace is under way. The
    first call may compile; then `register` tells torch's compiler the operators' shapes. A failure is told once; from
    then on torch computes, as with QKEEL_NATIVE=0.
    """
    if os.environ.get("QKEEL_NATIVE", "1") == "0" or sys.platform != "linux" or transformed():
        return False
    with _LOADING:
        return _loaded(name, register)


def direct(name: str, register: Callable[[], None]) -> ModuleType | None:
    """The functions of the source `name`.cpp that call no dispatcher of torch, None where there are none.

    They look themselves at what is under way, and leave to the operators what is not for them.
    """
    if os.environ.get("QKEEL_NATIVE", "1") == "0" or sys.platform != "linux":
        return None
    with _LOADING:
        return _functions(name) if _loaded(name, register) else None


@functools.cache
def _functions(name: str) -> ModuleType | None:
    found = importlib.machinery.ExtensionFileLoader(name, str(compiled(name)))
    try:
        return importlib.util.module_from_spec(importlib.util.spec_from_loader(name, found))  # type: ignore[arg-type]
    except ImportError:  # compiled where Python's headers are missing
        return None


@functools.cache
def _loaded(name: str, register: Callable[[], None]) -> bool:
    try:
        try:
            torch.ops.load_library(compiled(name))
        except OSError:  # sound, but not for this machine
            torch.ops.load_library(compiled(name, afresh=True))
        register()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        caution(f"qkeel computes without its compiled {name}: {reason}. QKEEL_NATIVE=0 silences this.")
        return False
    return True
