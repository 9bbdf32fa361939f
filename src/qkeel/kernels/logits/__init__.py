"""Statistics of logits in one pass over q and k, in C++ and in Triton; `kernels.statistics` does it block by block."""
