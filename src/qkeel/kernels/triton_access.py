"""Access to the Triton kernels: whether they can be used, and their import for the first CUDA tensor.

QKEEL_TRITON=0 disables them.

Which calls the kernels take is said by `logits.gpu` and `norm_rope.encode`; which were seen right on a GPU, and which were
taken out, by docs/internals/gpu.md.
"""

from __future__ import annotations

import functools
import os
import threading

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import caution
from qkeel.kernels.native.operators import STORED, is_plain
from qkeel.patching.torch_state import constant_when_compiled, transformed

_LOADING = threading.Lock()
# Least compute capability, the first with bfloat16.
_OLDEST = (8, 0)
# Largest head_dim of the statistics.
_WIDEST = 256


@constant_when_compiled
def usable(device: torch.device) -> bool:
    """True if Triton can currently be used for tensors on the device.

    False if QKEEL_TRITON=0, if Triton is missing (reported once), if it is not a GPU of NVIDIA's or is too old for
    bfloat16, or during a torch.func transform, export or trace. torch then computes the same results.
    """
    if (
        device.type != "cuda"
        or os.environ.get("QKEEL_TRITON", "1") == "0"
        or transformed()
    ):
        return False
    # Two threads must not register at once.
    with _LOADING:
        return _modern(device) and loaded()


@functools.cache
def loaded() -> bool:
    """True if Triton can be imported; registers the operators on the first call."""
    try:
        # Imported late, since Triton is slow to import and not on every system.
        from qkeel.kernels.norm_rope import triton_kernels as norm_rope
    except ImportError as error:
        caution(
            f"qkeel computes without its Triton kernels: {error}. QKEEL_TRITON=0 silences this."
        )
        return False
    norm_rope.register()
    return True


@functools.cache
def _modern(device: torch.device) -> bool:
    # AMD's devices are called "cuda" too. No kernel was ever run on one, and their capability is not comparable.
    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= _OLDEST
    )


def takes(q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]) -> bool:
    """True if the statistics kernels support q and k."""
    plain = all(is_plain(x) and x.dtype in STORED for x in (q, k))
    return (
        plain
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[-1] <= _WIDEST
        and usable(q.device)
    )
