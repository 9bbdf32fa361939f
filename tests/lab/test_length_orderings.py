"""What is published about length shows at small size (slow: 8 runs, some six minutes on 2 idle cores).

Bounds are those written down from a prototype before this code existed; nothing here is tuned to them.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
from pathlib import Path

import pytest

from qkeel import lab
from qkeel.lab.studies.grids import EXTRAPOLATION_BASE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Rows = list[dict[str, str]]


def rows(out: Path, forms: list[str], seeds: list[int], steps: int) -> Rows:
    base = dataclasses.replace(EXTRAPOLATION_BASE, steps=steps)
    contexts = lab.LongContexts(posthoc=("none", "baseline/rerope"))
    lab.study("extrapolation", remedies=forms, lrs=[0.01], seeds=seeds, out=out, base=base, jobs=2, contexts=contexts)
    with (out / "table.csv").open() as file:
        return list(csv.DictReader(file))


def values(table: Rows, form: str, column: str, posthoc: str = "none") -> list[float]:
    return [float(r[column]) for r in table if (r["form"], r["posthoc"]) == (form, posthoc)]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return rows(tmp_path_factory.mktemp("short") / "s", ["baseline", "qna", "kna", "cosa"], [0], 300)


@pytest.mark.parametrize(("form", "least", "most"), [("baseline", 0, 0.88), ("qna", 0, 0.88), ("kna", 0.9, 2)])
def test_normed_keys_keep_the_accuracy_that_others_lose(short: Rows, form: str, least: float, most: float) -> None:
    (kept,) = values(short, form, "kept_nonrepeat")
    assert least <= kept <= most


@pytest.mark.parametrize(("form", "points"), [("kna", 6), ("cosa", 3)])
def test_normed_keys_are_ahead_in_long_texts(short: Rows, form: str, points: float) -> None:
    (normed,), (plain,) = (values(short, name, "accuracy_nonrepeat") for name in (form, "baseline"))
    assert 100 * (normed - plain) >= points


def test_cosine_attention_keeps_most(short: Rows) -> None:
    assert values(short, "cosa", "kept_nonrepeat")[0] >= 0.84


def test_rerope_mends_the_baseline(short: Rows) -> None:
    assert values(short, "baseline", "kept_nonrepeat", "rerope")[0] >= 0.95


def test_the_gap_grows_with_training(short: Rows, tmp_path: Path) -> None:
    table = rows(tmp_path / "s", ["baseline", "kna_logn"], [0, 1], 1000)
    assert statistics.fmean(values(table, "kna_logn", "kept_nonrepeat")) >= 0.95
    assert max(values(table, "baseline", "kept_nonrepeat")) <= 0.80
    gap = [
        a - b
        for a, b in zip(*(values(table, form, "accuracy_nonrepeat") for form in ("kna_logn", "baseline")), strict=True)
    ]
    assert 100 * min(gap) >= 9
