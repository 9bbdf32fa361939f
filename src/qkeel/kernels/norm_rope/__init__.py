"""Norm, gain and rotation of queries and keys: what torch computes by the spec, in C++, in Triton."""
