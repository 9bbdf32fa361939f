"""Kernels timed side by side on this machine: `qkeel bench`, `python -m qkeel.bench`."""
