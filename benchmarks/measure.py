"""How everything here is timed: the package's own interleaved rounds, which `qkeel bench` uses too."""

from qkeel.bench.measure import Row, interleave, settle, show

__all__ = ["Row", "interleave", "settle", "show"]
