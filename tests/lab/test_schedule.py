from __future__ import annotations

import pytest

from qkeel.lab.build_run import learning_rate
from qkeel.lab.config import OptimConfig


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_the_warm_up_is_linear_to_the_peak(schedule: str) -> None:
    config = OptimConfig(lr=2.0, schedule=schedule, warmup=0.1)  # type: ignore[arg-type]
    assert [learning_rate(config, s, 100) for s in range(10)] == pytest.approx([0.2 * (s + 1) for s in range(10)])
    assert learning_rate(config, 10, 100) == 2.0


def test_constant_stays_cosine_and_wsd_fall_to_the_final_share() -> None:
    ends = {
        s: learning_rate(OptimConfig(lr=1.0, schedule=s), 999, 1000)  # type: ignore[arg-type]
        for s in ("constant", "cosine", "wsd")
    }
    assert ends["constant"] == 1.0
    assert ends["cosine"] == pytest.approx(0.05, abs=1e-4)
    assert ends["wsd"] == pytest.approx(0.05, abs=0.01)


def test_wsd_is_flat_until_the_last_fifth() -> None:
    config = OptimConfig(lr=1.0, schedule="wsd", final=0.0)
    assert learning_rate(config, 79, 100) == 1.0
    assert learning_rate(config, 90, 100) == pytest.approx(0.5)


def test_cosine_is_half_way_in_the_middle() -> None:
    config = OptimConfig(lr=1.0, warmup=0.0, final=0.0)
    assert learning_rate(config, 50, 100) == pytest.approx(0.5)


def test_short_runs_have_rates_too() -> None:
    for schedule in ("constant", "cosine", "wsd"):
        for warmup in (0.0, 0.5, 1.0):
            config = OptimConfig(lr=1.0, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
            for steps in (1, 2, 3):
                assert all(0 < learning_rate(config, s, steps) <= 1 for s in range(steps))
