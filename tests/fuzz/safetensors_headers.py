"""Safetensors files: what the header's parser takes, the format's own library takes, with the same tensors."""

from __future__ import annotations

import json
from typing import Any

import safetensors
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import numbers, texts, values
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import scratch

from qkeel.audit.scan import scan
from qkeel.records.parse import BITS, read_header

_NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "a", "__metadata__", "é"]


def inputs() -> SearchStrategy[tuple[bytes, int]]:
    """A header's text and how many bytes follow; half of them nearly sound."""
    return st.one_of(_sound(), _strange(), st.tuples(st.binary(max_size=40), st.integers(0, 64)))


@st.composite
def _sound(draw: st.DrawFn) -> tuple[bytes, int]:
    """Tensors one after the other, with at most one field changed."""
    table: dict[str, Any] = {}
    place = 0
    for name in draw(st.lists(st.sampled_from(_NAMES), max_size=3, unique=True)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = 1
        for n in shape:
            count *= n
        size = (count * BITS[dtype] + 7) // 8
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    if table and draw(st.booleans()):
        entry = table[draw(st.sampled_from(sorted(table)))]
        entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(values())
    text = json.dumps(table).encode("utf-8", "surrogatepass")
    return text + b" " * draw(st.integers(0, 8)), max(0, place + draw(st.sampled_from([0, 0, 0, 1, -1])))


def _strange() -> SearchStrategy[tuple[bytes, int]]:
    offsets = st.lists(numbers(), min_size=1, max_size=3)
    entry = st.fixed_dictionaries(
        {"dtype": st.one_of(st.sampled_from(sorted(BITS)), texts()), "shape": st.lists(numbers(), max_size=3)},
        optional={"data_offsets": offsets},
    )
    table = st.dictionaries(st.one_of(st.sampled_from(_NAMES), texts()), st.one_of(entry, values()), max_size=3)
    return st.tuples(table.map(lambda t: json.dumps(t).encode("utf-8", "surrogatepass")), st.integers(0, 64))


def check(case: tuple[bytes, int]) -> None:
    """Reads the header twice, and scans what holds tensors."""
    text, size = case
    with scratch() as place:
        file = place / "a.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
        found = read_header(file)
        with safetensors.safe_open(file, framework="pt") as other:
            assert set(other.keys()) == set(found.tensors)
            for name, entry in found.tensors.items():
                kept = other.get_slice(name)
                assert (kept.get_dtype(), tuple(kept.get_shape())) == (entry.dtype, entry.shape)
        scan(file, heads=False)


HUNT = Hunt(inputs=inputs, check=check)
