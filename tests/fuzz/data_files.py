"""Files of training data: text, lines of JSON, tokens; read as a corpus or refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import damages, inflict
from tests.fuzz.hostile import values
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import scratch

from qkeel.lab.config import DataConfig
from qkeel.lab.text import batch, heldout, load

_ENDS = [
    "a.txt",
    "a.jsonl",
    "a.jsonl#text",
    "a.jsonl#none",
    "a.bin",
    "a.bin#uint8",
    "a.bin#x",
    "a.parquet",
    ".",
    "*.txt",
]


def inputs() -> SearchStrategy[tuple[str, bytes, Any, int]]:
    """The source as a user names it, the bytes of the file, damage, and the vocabulary's size."""
    line = st.one_of(values().map(json.dumps), st.builds(lambda v: json.dumps({"text": v}), values()))
    lines = st.lists(line, max_size=6).map(lambda rows: "\n".join(rows).encode("utf-8", "surrogatepass"))
    text = st.one_of(lines, st.binary(max_size=200), st.text(max_size=100).map(lambda t: t.encode("utf-8")))
    harm = st.one_of(st.none(), damages())
    return st.tuples(st.sampled_from(_ENDS), text, harm, st.sampled_from([0, 1, 256, 70_000]))


def check(case: tuple[str, bytes, Any, int]) -> None:
    """Loads the corpus and takes a batch and the held-out windows."""
    name, content, harm, size = case
    with scratch() as place:
        file = place / name.partition("#")[0].replace("*", "a")
        if name != ".":
            file.write_bytes(content * 3)
            if harm is not None:
                inflict(file, harm)
        config = DataConfig(source=str(place / name), context=4, batch=2, vocab_size=size or None)
        corpus = load(config)
        assert batch(corpus, config, 0, 0).shape == (2, 5)
        assert heldout(corpus, 4, 3).max() < corpus.vocab_size


HUNT = Hunt(inputs=inputs, check=check)
