"""Faster implementations of the same formulas. Kernels do not depend on each other or on the reference
implementation."""
