"""C++ operators, compiled on first use. If there is no compiler, torch computes the same results."""

from qkeel.kernels.native.operators import ready

__all__ = ["ready"]
