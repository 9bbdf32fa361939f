"""The predictions: what was registered is unchanged, pages say what tables say, and verdicts follow from numbers."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from predictions import edge_of_chaos, transfer
from predictions.__main__ import PAGES
from predictions.order import crossing, kendall, over_seeds
from predictions.pages import DOCS, HERE
from predictions.run import SIZES, compared_units, edge_units, left, tuning_units
from predictions.table import PLACES, read

from qkeel.lab.plan import ONE_OF_EACH as REMEDIES
from qkeel.lab.studies import find_study

# The first 16 digits of SHA-256, as they were committed before the runs: text and code of a prediction do not change.
REGISTERED = {
    "order.py": "f7bfd67512ca2462",
    "edge_of_chaos.py": "ef18e010719ac759",
    "transfer.py": "b29a6fa654cdd490",
    "edge_of_chaos.md": "476949b250d66bc4",
    "transfer.md": "b7305b90c9a0f436",
}


@pytest.mark.parametrize("study", [name for name, place in PLACES.items() if place.exists()])
def test_a_page_says_what_the_committed_table_says(study: str) -> None:
    about, rows = read(PLACES[study])
    for name, text in PAGES[study](about, rows).items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run python -m predictions"
    grid = find_study(study).grid
    assert {row["remedy"] for row in rows} == set(grid.remedies)
    assert {row["seed"] for row in rows} <= {*grid.seeds, *grid.tuning_seeds}


def test_what_was_registered_is_unchanged() -> None:
    now = {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16] for name in REGISTERED}
    assert now == REGISTERED


def test_statistics_of_order_are_those_of_the_definition() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 4.0])
    assert kendall(x, y) == pytest.approx(4 / 6)
    assert kendall(x, np.array([1.0, 1.0, 2.0, 3.0])) == pytest.approx(5 / math.sqrt(6 * 5))  # one tie
    lrs = (0.01, 0.02, 0.04)
    assert 2 ** crossing(lrs, np.array([0.0, 2.0, 9.0]), 1.0) == pytest.approx(0.01 * math.sqrt(2))
    assert crossing(lrs, np.array([2.0, 2.0, 2.0]), 1.0) == pytest.approx(math.log2(0.01) - 0.5)
    assert crossing(lrs, np.zeros(3), 1.0) == pytest.approx(math.log2(0.04) + 0.5)
    values = np.array([1.0, 2.0, 3.0, 4.0])
    value, low, high = over_seeds(4, lambda seeds: float(values[seeds].mean()))
    assert (value, low < 1.6, high > 3.4) == (2.5, True, True)


def chaotic(edge: float, knee: float) -> list[dict[str, object]]:
    """Rows of cells whose edges and knees stand in this order or in the other."""
    rows = []
    for i, remedy in enumerate(("none", "a", "b", "c", "d")):
        for seed in (0, 1, 2):
            for lr in (0.012 * 2**k for k in range(6)):
                rows.append(
                    {
                        "d_model": 32,
                        "remedy": remedy,
                        "seed": seed,
                        "lr": lr,
                        "val_loss": 2.5 + (lr / (0.02 * 2 ** (knee * i))) ** 2 * 0.1,
                        "init_loss": 6.0,
                        "exponent": edge_of_chaos.EDGE * lr / (0.02 * 2 ** (edge * i)),
                        "max_abs_logit": 10.0,
                        "logit_distance": 1.0,
                        "loss_difference": 0.1 * (lr > 0.02 * 2 ** (edge * i)),
                    }
                )
    return rows


def test_verdicts_on_the_edge_follow_from_numbers() -> None:
    same = edge_of_chaos.judged(chaotic(edge=0.7, knee=0.7))
    assert [same[name]["verdict"] for name in ("order", "size", "rival", "floor")] == ["held"] * 4
    turned = [{**row, "exponent": 0.1, "loss_difference": 0.0} for row in chaotic(edge=-0.7, knee=0.7)]
    assert edge_of_chaos.judged(chaotic(edge=-0.2, knee=0.7))["order"]["verdict"] == "refuted"
    assert edge_of_chaos.judged(turned)["floor"]["verdict"] == "refuted"


def compared(order: dict[int, int]) -> list[dict[str, object]]:
    """Rows whose losses rise in the order of the remedies at widths of 1 and fall at those of -1."""
    return [
        {
            "parametrisation": how,
            "d_model": width,
            "remedy": remedy,
            "seed": seed,
            "lr": 0.01,
            "val_loss": 2.4 + 0.02 * i * order[width] + 0.001 * ((seed * (i + 1)) % 3),
            "cpu_seconds": 1.0,
        }
        for (how, _), widths in SIZES.items()
        for width in widths
        for i, remedy in enumerate(REMEDIES)
        for seed in (0, 1, 2, 3, 1000)
    ]


def test_verdicts_on_transfer_follow_from_numbers() -> None:
    alike = transfer.judged(compared({16: -1, 32: 1, 64: 1}))
    names = ("order", "nearer", "mup", "advice", "advice16")
    assert [alike[name]["verdict"] for name in names] == ["held"] * 5
    turned = transfer.judged(compared({16: 1, 32: -1, 64: 1}))
    assert [turned[name]["verdict"] for name in names] == ["refuted", "refuted", "held", "refuted", "refuted"]
    assert turned["pairs"]["standard", 32][4] == 0
    assert transfer.front({"none": (0.0, 1.0), "a": (0.1, 1.1), "b": (0.05, 1.2)}) == ["none", "a"]


def test_units_are_what_the_studies_plan_and_only_what_is_missing_is_done() -> None:
    grid = find_study("edge").grid
    units = edge_units(grid.seeds, 150, grid.d_model)
    runs = len(grid.remedies) * len(grid.lrs) * len(grid.seeds) * len(grid.d_model)
    assert sum(len(unit.lrs) * len(unit.seeds) for unit in units) == runs
    assert [unit.seeds[0] for unit in units] == sorted(unit.seeds[0] for unit in units)
    done = [{**units[0].about(), "lr": lr, "seed": 0} for lr in units[0].lrs]
    assert left(units, done) == units[1:]
    tuning = tuning_units([1000, 1001], 150, (16,))
    table = [
        {**u.about(), "lr": lr, "seed": s, "val_loss": abs(lr - 0.024)} for u in tuning for lr in u.lrs for s in u.seeds
    ]
    chosen = compared_units(tuning, table, range(8))
    assert {unit.lrs for unit in chosen} == {(0.024,)}
    assert len(chosen) == len(tuning) == 2 * len(REMEDIES)
