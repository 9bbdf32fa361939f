"""Attention of a few new tokens to a long cache, in C++."""
