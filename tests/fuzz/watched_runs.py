"""The journals of watched models, damaged: `report` writes a page or says which file is damaged."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import Damage, damages, inflict
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole
from tests.report.synthetic_watch import Seen, make_watch

from qkeel import report


def _make(place: Path) -> None:
    make_watch(place / "watch", Seen(layers=2, heads=3, samples=24))


def inputs() -> SearchStrategy[list[tuple[int, Damage]]]:
    """Damage to one file or two."""
    return st.lists(st.tuples(st.integers(0, 200), damages()), min_size=1, max_size=2)


def check(case: list[tuple[int, Damage]]) -> None:
    """Makes the page."""
    files = whole(_make)
    with scratch() as place:
        lay_out(files, place)
        for number, harm in case:
            path = place / files[number % len(files)][0]
            if path.is_file() and not path.is_symlink():
                inflict(path, harm)
        page = report.write(place / "watch", place / "page.html")
        assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


HUNT = Hunt(inputs=inputs, check=check, few=40)
