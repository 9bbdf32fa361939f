"""The roofline: counts of bytes and operations by hand."""

import pytest
from benchmarks.roofline import Sizes, _placed, operators
from benchmarks.timing import BenchRow

SMALL = Sizes(batch=1, tokens=3, heads=2, head_dim=8, layers=1, dim=64, matrix=8)


def test_bytes_and_operations_are_counted_as_by_hand():
    # 48 numbers in q; 2 heads of 1 + 2 + 3 visible pairs; 12 · 64² weights.
    counted = {op.name: (op.bytes, op.flops) for op in operators(SMALL, compiled=False)}
    assert counted["norm + rope: eager"] == (4 * 48 * 4, 14 * 48)
    assert counted["norm + rope, f+b: eager"] == (10 * 48 * 4, 42 * 48)
    assert counted["attention: torch SDPA"] == (4 * 48 * 4, 2 * 2 * 12 * 8)
    assert counted["attention, f+b: torch SDPA"] == (12 * 48 * 4, 7 * 2 * 12 * 8)
    assert counted["statistics pass"] == (2 * 48 * 4, 2 * 12 * 8)
    assert counted["AdamW, fused"] == (7 * 4 * 49152, 12 * 49152)


def test_the_share_is_the_time_of_the_roof_over_the_time_taken():
    named = {op.name: op for op in operators(SMALL, compiled=False)}
    bandwidth = {
        "copy": {"L2": 1e6, "memory": 5e5},
        "in place": {"L2": 4e6, "memory": 2e6},
    }
    # 768 bytes at 1 MB/s take 0.768 ms; what is changed in place is read at 2 MB/s.
    for name, ms, level, share in (
        ("attention: torch SDPA", 1.0, "L2", 0.768),
        ("AdamW, fused", 1376.256, "memory", 0.5),
    ):
        row = BenchRow(name, [ms], [1.0])
        limits = {"L2": 4096, "memory": 0}
        at = _placed(named[name], row, bandwidth, 1e9, limits)
        assert (at["level"], at["limit"]) == (level, "bytes")
        assert at["share"] == pytest.approx(share, abs=1e-4)
