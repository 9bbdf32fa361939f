"""Attention written out by hand, followed from q kᵀ to its softmax."""
