"""Studies and runs with damaged files: `report` writes a page or says which file is damaged."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import Damage, damages, inflict
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole
from tests.report.synthetic_study import Made, make_study

from qkeel import report

_RUNS = [
    Made(remedy="none", lr=0.01, status="done"),
    Made(remedy="lalr", lr=0.01, status="done"),
    Made(remedy="lalr", lr=0.1, status="failed"),
    Made(remedy="none", lr=0.1, status="started"),
]


def _make(place: Path) -> None:
    make_study(place / "study", _RUNS)


def inputs() -> SearchStrategy[tuple[list[tuple[int, Damage]], bool]]:
    """Damage to one file or two, and whether the page is of one run."""
    return st.tuples(st.lists(st.tuples(st.integers(0, 200), damages()), min_size=1, max_size=2), st.booleans())


def check(case: tuple[list[tuple[int, Damage]], bool]) -> None:
    """Makes the page."""
    harms, single = case
    files = [item for item in whole(_make) if not item[0].endswith("lock")]
    with scratch() as place:
        lay_out(tuple(files), place)
        for number, harm in harms:
            path = place / files[number % len(files)][0]
            if path.is_file() and not path.is_symlink():
                inflict(path, harm)
        runs = sorted((place / "study" / "runs").iterdir())
        page = report.write(runs[0] if single else place / "study", place / "page.html")
        assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


HUNT = Hunt(inputs=inputs, check=check, few=30)
