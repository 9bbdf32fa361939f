"""The state of torch at this moment: compiling, transforming, tracing, or computing a checkpointed pass again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

# Where torch lacks the name every call counts; tests/patching says so.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def constant_when_compiled(function: AnyFunction) -> AnyFunction:
    """Marks a function whose answer torch's compiler takes for a constant, at the time it compiles. As
    torch.compiler.assume_constant_result, which would import the compiler together with qkeel."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def running_frames() -> Iterator[FrameType]:
    """The frames of Python that are running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def recomputing() -> bool:
    """True if this is a backward pass, where gradient checkpointing computes forward passes again."""
    return _graph_task() != -1


def in_function_transform() -> bool:
    """True if a torch.func transform is under way: its tensors mean nothing outside of it."""
    return get_interpreter_stack() is not None


def in_vmap() -> bool:
    """True if torch.func.vmap is under way: its tensors lack the dimension that is mapped over."""
    levels = get_interpreter_stack()
    return levels is not None and any(level.key() == TransformType.Vmap for level in levels)


@constant_when_compiled
def with_tangents() -> bool:
    """True if tensors may have tangents, which operators without a forward derivative would drop: inside
    torch.autograd.forward_ad.dual_level, torch.func.jvp, jacfwd, hessian and linearize."""
    levels = get_interpreter_stack()
    inside = levels is not None and any(level.key() == TransformType.Jvp for level in levels)
    return inside or forward_ad._current_level >= 0


def transformed_now() -> bool:
    """True if a torch.func transform or forward-mode differentiation is under way."""
    return get_interpreter_stack() is not None or forward_ad._current_level >= 0


def transformed() -> bool:
    """True if a torch.func transform, forward-mode differentiation, export or trace is under way."""
    # What is exported or traced runs elsewhere, in programs that do not have qkeel's operators.
    differentiated = in_function_transform() or with_tangents()
    return differentiated or torch.compiler.is_exporting() or torch.jit.is_tracing()


def in_python_mode() -> bool:
    """True if a mode in Python is active that sees or replaces torch's calls, but for torch.set_default_device's."""
    functions = _get_current_function_mode_stack()
    return _get_current_dispatch_mode() is not None or any(type(mode) is not DeviceContext for mode in functions)


def run_uncompiled(*codes: CodeType) -> None:
    """Has torch's compiler run frames of this code as they are, and go on with what they call."""
    for code in codes:
        torch._dynamo.eval_frame.skip_code(code)


def compiler_loaded() -> bool:
    """True if anything was, or could be, compiled in this process."""
    return "torch._dynamo" in sys.modules


def compile_again() -> None:
    """Has everything that was compiled so far compiled from scratch: for a change that no guard of it notices."""
    if compiler_loaded():
        torch._dynamo.reset()


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given, of what it returned; any other as it is."""
    return module._orig_mod if _is_wrapper(module) else module  # type: ignore[return-value]


def is_compiled(module: nn.Module) -> bool:
    """True if calls of this module run compiled code: torch.compile returned it, or its own compile() was called."""
    return _is_wrapper(module) or module._compiled_call_impl is not None


def _is_wrapper(module: nn.Module) -> bool:
    return compiler_loaded() and isinstance(module, torch._dynamo.OptimizedModule)
