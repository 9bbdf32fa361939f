"""Benchmarks: ratios measured side by side in one interleaved run. See docs/benchmarks.md."""
