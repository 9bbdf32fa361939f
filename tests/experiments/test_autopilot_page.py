"""The page of the autopilot's results is what its command prints from the committed runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.autopilot_page import latent_table, page, share_interval

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_written_from_the_committed_runs() -> None:
    written, results = (
        (ROOT / "experiments" / "notes" / "autopilot.md").read_text(encoding="utf-8"),
        ROOT / "experiments" / "results",
    )
    assert page([results / "autopilot-2026-11-22.csv"]) == written
    assert latent_table(results / "autopilot-mla-2026-11-22.csv", (40, 41, 42, 43)) in written


def test_an_interval_of_a_share_is_the_exact_one() -> None:
    assert share_interval(8, 8) == pytest.approx((0.025 ** (1 / 8), 1.0))
    assert share_interval(0, 12) == pytest.approx((0.0, 1 - 0.025 ** (1 / 12)))
