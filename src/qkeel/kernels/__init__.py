"""Faster implementations of the same formulas. Kernels do not depend on each other or on the reference
implementation.

The files:

    choose               which kernel a call of attention gets; contract: what a kernel is
    attention, decoding  whole sequences; a few new tokens and a cache
    norm_rope            norm and rotation of q and k
    statistics, logits   statistics, block by block; in C++ and Triton (logits.gpu: the calls that a GPU kernel takes)
    native               compiles the C++; triton_access: whether Triton is used
"""
