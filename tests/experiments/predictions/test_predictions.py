"""The predictions: pages quote the verdicts that stored tables give, and verdicts follow from numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from experiments.predictions import edge_again, edge_of_chaos, transfer, transfer_again
from experiments.predictions.__main__ import PREDICTIONS
from experiments.predictions.order import crossing, kendall, over_seeds
from experiments.predictions.table import RESULTS
from experiments.studies import ONE_OF_EACH
from experiments.studies.edge import EDGE_LRS
from tests.quick import quick


@pytest.mark.parametrize("page", quick(PREDICTIONS, lambda page: page != "transfer"))
def test_a_page_quotes_the_verdicts_that_the_stored_tables_give(page: str) -> None:
    text = (RESULTS.parent / "notes" / "results" / f"{page}.md").read_text(encoding="utf-8")
    lines = PREDICTIONS[page]()
    assert len(lines) >= 5
    assert [line for line in lines if line not in text] == []


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


# Parametrisation and number of blocks -> widths. µP is the standard parametrisation at width 64.
SIZES = {
    ("standard", 2): (16, 32, 64, 128),
    ("mup", 2): (16, 32, 128),
    ("standard", 1): (64,),
    ("standard", 4): (64,),
}


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


def parted(side: float) -> list[dict[str, object]]:
    """Rows of ten remedies at three widths: the edge stands `side` octaves over the knee where q and k are held and
    under it elsewhere, logits pass 100 a little farther from the knee, and both fall by an octave with each width."""
    rows = []
    for d_model in (32, 64, 128):
        for i, remedy in enumerate(ONE_OF_EACH):
            knee = 0.02 * 2 ** (0.35 * i) * 64 / d_model
            edge = knee * 2 ** (side if remedy in edge_again.HELD else -side)
            for seed in edge_again.SEEDS:
                for lr in EDGE_LRS:
                    rows.append(
                        {
                            "d_model": d_model,
                            "remedy": remedy,
                            "seed": seed,
                            "lr": lr,
                            "val_loss": 2.5 + 0.1 * (lr / knee) ** 2,
                            "init_loss": 6.0,
                            "exponent": edge_of_chaos.EDGE * lr / edge,
                            "max_abs_logit": 100 * lr / knee / 2**0.45,
                            "logit_distance": 1.0,
                            "loss_difference": 0.1 * (lr > edge),
                        }
                    )
    return rows


def test_verdicts_of_the_second_prediction_of_the_edge_follow_from_numbers() -> None:
    assert {said for *_, said in edge_again.judged(parted(0.5))} == {"held"}
    turned = {name: said for name, _, _, said in edge_again.judged(parted(-0.5))}
    assert [turned[name] for name in ("order", "held", "others")] == ["held", "refuted", "refuted"]


def compared(order: dict[int, int], blocks: Sequence[int] = (2,)) -> list[dict[str, object]]:
    """Rows whose losses rise in the order of the remedies at widths of 1 and fall at those of -1."""
    return [
        {
            "parametrisation": how,
            "n_layers": n_layers,
            "d_model": width,
            "remedy": remedy,
            "seed": seed,
            "lr": 0.01,
            "val_loss": 2.4 + 0.02 * i * order[width] + 0.001 * ((seed * (i + 1)) % 3),
            "cpu_seconds": 1.0,
        }
        for (how, n_layers), widths in SIZES.items()
        for width in widths
        if width in order and n_layers in blocks
        for i, remedy in enumerate(ONE_OF_EACH)
        for seed in (0, 1, 8, 9, 1000)
    ]


def test_verdicts_on_transfer_follow_from_numbers() -> None:
    alike = transfer.judged(compared({16: -1, 32: 1, 64: 1}))
    names = ("order", "nearer", "mup", "advice", "advice16")
    assert [alike[name]["verdict"] for name in names] == ["held"] * 5
    turned = transfer.judged(compared({16: 1, 32: -1, 64: 1}))
    assert [turned[name]["verdict"] for name in names] == ["refuted", "refuted", "held", "refuted", "refuted"]
    rows = compared({16: -1, 32: 1, 64: 1, 128: 1}, blocks=(1, 2, 4))
    second = {name: said for name, _, _, said in transfer_again.judged(rows)}
    assert second.pop("no gain") == "held"
    assert set(second.values()) == {"held"}
    turned_wide = compared({16: 1, 32: 1, 64: 1, 128: -1}, blocks=(1, 2, 4))
    assert {n: s for n, _, _, s in transfer_again.judged(turned_wide)}["advice128"] == "refuted"
