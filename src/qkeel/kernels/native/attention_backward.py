"""The gradient of attention as one compiled operator, and its shapes for torch's compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkeel.kernels.native.loader import usable


def ready() -> bool:
    """Whether the operator can be used here and now; the compiled attention then takes it for its derivative."""
    return usable("attention_backward", _register)


# What torch.compiler.assume_constant_result sets; that function would import torch's compiler with qkeel.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _register() -> None:
    torch.library.register_fake("qkeel_native::attention_backward", _shapes)


def _shapes(up: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k, v))
    return dq, dk, dv
