"""Attention over whole sequences: in blocks, by torch's fused kernels, in two bands, by FlexAttention, in C++."""
