"""C++ operators, compiled on first use. If there is no compiler, torch computes the same results."""

from qkeel.kernels.native.operators import norm_rope_ready

__all__ = ["norm_rope_ready"]
