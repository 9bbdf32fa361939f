"""The compiled C++ operators as torch operators: norm and rotation."""

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
from jaxtyping import Float
from torch import Tensor, nn

from qkeel.errors import caution
from qkeel.kernels.native.build import compiled
from qkeel.patching.modes import constant_when_compiled, transformed

# Building, loading and registering compiled operators on first use.

STORED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that operators read; they compute in float32
WIDEST = 1024  # WIDEST in the sources
_LOADING = threading.Lock()


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OperatorSource:
    """The operators of one C++ source, `source/NAME.cpp`, which defines them as torch.ops.qkeel_native.OPERATOR.

    `shapes` maps each operator to a function of the same arguments that returns empty tensors with the shapes of the
    results; torch.compile calls this function instead of the operator.
    """

    name: str
    shapes: Mapping[str, Callable[..., object]]

    @constant_when_compiled
    def ready(self) -> bool:
        """True if the operators can currently be used; the first call may compile them.

        False if QKEEL_NATIVE=0 disables them, if they cannot be compiled, and under a torch.func transform, an export
        or a trace. A failure is reported once, after which torch computes instead.
        """
        if _switched_off() or transformed():
            return False
        with _LOADING:
            return _loaded(self) is not None

    def functions(self) -> ModuleType | None:
        """Returns the source's Python functions, which bypass torch's dispatcher; None if there are none.

        They check the state of torch themselves and leave what they cannot compute to the operators.
        """
        if _switched_off():
            return None
        with _LOADING:
            library = _loaded(self)
            return None if library is None else _functions(self.name, library)


def is_plain(x: Tensor) -> bool:
    """True for torch's own tensor class; a subclass may override operators."""
    return type(x) in (Tensor, nn.Parameter)


def reads(x: Tensor) -> bool:
    """True if operators support x: a plain tensor of a STORED dtype, with rows of at most 1,024 numbers, a multiple of
    8."""
    return is_plain(x) and x.dtype in STORED and x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= WIDEST and x.numel() > 0


def _switched_off() -> bool:
    return os.environ.get("QKEEL_NATIVE", "1") == "0" or sys.platform != "linux"


@functools.cache
def _functions(name: str, library: str) -> ModuleType | None:
    found = importlib.machinery.ExtensionFileLoader(name, library)
    try:
        return importlib.util.module_from_spec(importlib.util.spec_from_loader(name, found))  # type: ignore[arg-type]
    except ImportError:  # compiled without Python's headers
        return None


@functools.cache
def _loaded(source: OperatorSource) -> str | None:
    """Loads the library and returns its path, or warns and returns None if there is no library."""
    try:
        library = str(compiled(source.name))
        try:
            ctypes.CDLL(library)
        except OSError:  # built on another machine that shares the folder, or torn
            library = str(compiled(source.name, anew=True))
            ctypes.CDLL(library)
        for operator, shapes in source.shapes.items():
            torch.library.register_fake(f"qkeel_native::{operator}", shapes)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _tell(source.name, " ".join(str(error).split()))
        return None
    return library


@functools.cache
def _reasons() -> set[str]:
    return set()


def _tell(name: str, reason: str) -> None:
    """Reports a reason once, even if it affects several sources."""
    if reason not in _reasons():
        _reasons().add(reason)
        caution(f"qkeel computes without its compiled {name}: {reason}. QKEEL_NATIVE=0 silences this.")


# Norm and rotation of q or k as one compiled operator, with its derivative.

NONE = 0  # kind of a call that only rotates
WHOLE = 4  # added to the kind for a norm over all heads of a token, which only the Triton kernels support
CosSin = tuple[Float[Tensor, "b 1 t half"], Float[Tensor, "b 1 t half"]]  # cos and sin, float32; b and t may be 1


def norm_rope(
    x: Float[Tensor, "b h t d"], gain: Tensor | None, table: CosSin | None, kind: int, eps: float, keep_x: bool
) -> Float[Tensor, "b h t d"]:
    """Returns rotation(gain · norm(x)), in x's dtype and layout.

    Args:
        x: q or k.
        gain: the gain, of shape [], [d], [h 1] or [h d]; None for no gain.
        table: cos and sin of the rotation.
        kind: 0 for no norm, 1 for RMS, 2 for L2, 3 for LayerNorm.
        eps: eps of the norm.
        keep_x: whether to keep x for backward; if False, the result is kept, from which x̂ is recomputed.
    """
    cos, sin = (None, None) if table is None else table
    if not (torch.is_grad_enabled() and (x.requires_grad or (gain is not None and gain.requires_grad))):
        return torch.ops.qkeel_native.norm_rope_alone(x, gain, cos, sin, kind, eps)  # halves the time of a small call
    return torch.ops.qkeel_native.norm_rope(x, gain, cos, sin, kind, eps, keep_x)[0]


def _forward_shapes(
    x: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, kind: int, eps: float, keep_x: bool
) -> tuple[Tensor, Tensor]:
    y = same_shape(x)
    if kind == NONE:
        return y, y.new_empty(0, dtype=torch.float32)
    b, h, t = y.shape[:3]
    if y.stride(1) < y.stride(2):
        return y, y.new_empty(b, t, h, dtype=torch.float32).transpose(1, 2)
    return y, y.new_empty(b, h, t, dtype=torch.float32)


def same_shape(x: Tensor, *_: object) -> Tensor:
    """Returns an empty tensor like x, with contiguous rows."""
    return torch.empty_like(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


def backward_shapes(
    dy: Tensor, kept: Tensor, inverse: Tensor, gain: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for the gradients of x and of the gain, the latter per head or for all heads."""
    shape = (0,) if gain is None else (kept.shape[1] if gain.ndim == 2 else 1, kept.shape[3])
    return same_shape(kept), kept.new_empty(shape, dtype=torch.float32)


# norm_rope_two(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps): `norm_rope` of q and k with one table in one call,
# without a gradient. gain_spread(gain): min |gain| / max |gain|; 0 for a gain with zeros or NaN.
NORM_ROPE_OPERATORS = OperatorSource(
    "norm_rope",
    {
        "norm_rope": _forward_shapes,
        "norm_rope_alone": same_shape,
        "norm_rope_two": lambda q, k, *_: (same_shape(q), same_shape(k)),
        "norm_rope_backward": backward_shapes,
    },
)
norm_rope_ready = NORM_ROPE_OPERATORS.ready
# Python functions with less overhead than an operator, for a single token:
# - encode(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps) returns q and k like `norm_rope_two`; None for tensors
#   other than plain CPU tensors, under transforms and modes, and if a gradient is needed.
# - place(pos) is the number that all of `pos` equal, or None.
functions = NORM_ROPE_OPERATORS.functions
