"""Operators in C++, compiled on first use; without a compiler the same numbers come from torch."""

from qkeel.kernels.native.norm_rope import ready

__all__ = ["ready"]
