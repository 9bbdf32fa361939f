"""Norm and rotation of q and k in C++, compiled on first use; without a compiler the same numbers from torch."""

from qkeel.kernels.native.encode import encoded
from qkeel.kernels.native.norm_rope import ready

__all__ = ["encoded", "ready"]
