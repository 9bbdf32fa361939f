"""C++ operators, compiled on first use. Without a compiler torch computes the same numbers."""

from qkeel.kernels.native.operators import norm_rope_ready

__all__ = ["norm_rope_ready"]
