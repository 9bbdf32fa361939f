"""Operators in C++, compiled on first use; without a compiler the same numbers come from torch."""

from qkeel.kernels.native.operators import norm_rope_ready

__all__ = ["norm_rope_ready"]
