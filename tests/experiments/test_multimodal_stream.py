"""The benchmark of the residual stream: a short run, and the page's numbers from rows worked by hand."""

from __future__ import annotations

import math

import pytest
from experiments.multimodal_stream import (
    BEGIN,
    END,
    LRS,
    MIXES,
    REMEDIES,
    growth,
    late_growth,
    section,
    train,
    with_section,
)


def test_a_run_records_what_leaves_the_last_block_at_each_measured_step() -> None:
    row = train("none", "text", 0.01, 0, steps=4)
    assert row["steps"] == [0, 4]
    assert all(len(row[name]) == 2 and min(row[name]) > 0 for name in ("rms", "channel_ratio", "max_logit"))


def test_late_growth_is_the_end_over_the_middle_and_the_page_has_the_mean_of_its_logarithm() -> None:
    rows = [
        {"remedy": remedy, "mix": mix, "lr": lr, "seed": seed, "steps": [0, 10, 20]}
        | {"rms": [1.0, 2.0, 8.0 if mix == "mix" else 4.0], "channel_ratio": [1.0, 1.0, 5.0], "max_logit": [1.0] * 3}
        for remedy in REMEDIES
        for mix in MIXES
        for lr in LRS
        for seed in range(6)
    ]
    assert late_growth(rows[0]) == pytest.approx(math.log(2.0))
    lines = section(rows).splitlines()
    assert len(lines) == 2 + len(REMEDIES) * len(LRS)
    # text 4 / 2, mix 8 / 2, their ratio, mix 8 / 1, the ends 8 / 4, the channel ratio
    numbers = [f"{x}.00 ({x}.00 to {x}.00)" for x in (2, 4, 2, 8, 2, 5)]
    assert lines[2] == f"| none | 0.01 | {' | '.join(numbers)} |"
    assert late_growth(rows[0]) < growth(rows[0]) == pytest.approx(math.log(4.0))


def test_the_section_of_a_page_is_replaced_and_the_rest_stays() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_section(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
