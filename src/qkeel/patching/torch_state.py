"""Private operators of torch, and what torch is doing: compiling, transforming, tracing, or recomputing a pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

# Torch operators without a public function: attention kernels, and operators over lists.

# They return (output, row logsumexps, ...); F.scaled_dot_product_attention returns only the output.
flash_on_cpu: Callable[..., Any] = torch._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)

# Operators over a list of tensors, which work in place.
multiply_all = torch._foreach_mul_
copy_to_all = torch._foreach_copy_
lerp_all_in_place = torch._foreach_lerp_


# Whether torch is currently compiling, transforming, tracing, or recomputing a checkpointed pass.

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# A context in which operators run without autograd, which has been seen to: a call through it costs ten times as much.
below_autograd = torch._C._AutoDispatchBelowAutograd

# If torch lacks the name, recomputed passes are counted too; tests/patching covers this.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def constant_when_compiled(function: FunctionT) -> FunctionT:
    """Marks a function so that torch.compile treats its result at compile time as a constant.

    torch.compiler.assume_constant_result does the same, but would import the compiler together with qkeel."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def running_frames() -> Iterator[FrameType]:
    """Yields this thread's Python frames, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def recomputing() -> bool:
    """True in a backward pass, where gradient checkpointing recomputes forward passes."""
    return _graph_task() != -1


@constant_when_compiled
def in_function_transform() -> bool:
    """True inside a torch.func transform, whose tensors are invalid outside it."""
    return get_interpreter_stack() is not None


def in_vmap() -> bool:
    """True inside torch.func.vmap, whose tensors lack the mapped dimension."""
    levels = get_interpreter_stack()
    return levels is not None and any(
        level.key() == TransformType.Vmap for level in levels
    )


def with_tangents() -> bool:
    """True if tensors may have tangents, which operators without forward derivatives would drop.

    This is the case inside torch.autograd.forward_ad.dual_level, torch.func.jvp, jacfwd, hessian and linearize."""
    # In a compiled graph, this comparison becomes a guard on the level outside it, and its result is kept for the whole
    # graph, so transforms within the graph are asked for separately.
    return forward_ad._current_level >= 0 or _in_dual_level()


@constant_when_compiled
def _in_dual_level() -> bool:
    # Transforms of torch.func enter a dual level, too. torch.compile cannot trace the question for their stack.
    return forward_ad._current_level >= 0


def transformed_now() -> bool:
    """True inside a torch.func transform or forward-mode differentiation."""
    return in_function_transform() or forward_ad._current_level >= 0


def transformed() -> bool:
    """True inside a torch.func transform, forward-mode differentiation, an export or a trace."""
    # Exported and traced programs run elsewhere, without qkeel's operators.
    differentiated = transformed_now()
    return differentiated or torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_fake(x: Tensor) -> bool:
    """True for a FakeTensor, with which torch infers shapes without computing values."""
    home = sys.modules.get("torch._subclasses.fake_tensor")
    return home is not None and isinstance(x, home.FakeTensor)


def run_uncompiled(*codes: CodeType) -> None:
    """Makes torch.compile skip frames that run this code, but not the functions they call."""
    for code in codes:
        torch._dynamo.eval_frame.skip_code(code)


def compiler_loaded() -> bool:
    """True if torch.compile has been imported, so that something may have been compiled."""
    return "torch._dynamo" in sys.modules


def compile_again() -> None:
    """Discards all compiled code, after a change that the guards of the code do not detect."""
    if compiler_loaded():
        torch._dynamo.reset()


def is_wrapper_of_compiled(module: nn.Module) -> bool:
    """True for torch.compile's wrapper around a module."""
    return compiler_loaded() and isinstance(module, torch._dynamo.OptimizedModule)


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module inside torch.compile's wrapper, and any other module unchanged."""
    return module._orig_mod if is_wrapper_of_compiled(module) else module  # type: ignore[return-value]


def is_compiled(module: nn.Module) -> bool:
    """True if calling this module runs code compiled by torch.compile or by the module's own compile()."""
    return module._compiled_call_impl is not None or is_wrapper_of_compiled(module)
