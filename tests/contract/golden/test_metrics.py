"""LR sensitivity."""

from __future__ import annotations

import math

import pytest

from qkeel.errors import InvalidValueError
from qkeel.metrics import lr_sensitivity

LOSSES = [3.5, 3.3, 3.2, 3.25, 3.6, 9.0, math.inf]
INIT = math.log(32101)


def test_lr_sensitivity_of_the_worked_example() -> None:
    assert pytest.approx(10.376642, abs=5e-7) == INIT
    # (0.3 + 0.1 + 0 + 0.05 + 0.4 + 5.8 + 7.176642) / 7
    assert lr_sensitivity(LOSSES, INIT) == pytest.approx(1.975235, abs=5e-7)


def test_a_diverged_run_counts_as_the_loss_of_initialisation_however_it_diverged() -> (
    None
):
    for worst in (math.nan, 1e9, 10.5):
        assert lr_sensitivity([*LOSSES[:-1], worst], INIT) == pytest.approx(
            1.975235, abs=5e-7
        )


def test_lr_sensitivity_does_not_depend_on_order_and_is_zero_for_equal_losses() -> None:
    assert lr_sensitivity(LOSSES[::-1], INIT) == pytest.approx(
        lr_sensitivity(LOSSES, INIT), rel=1e-15
    )
    assert lr_sensitivity([3.0, 3.0, 3.0], INIT) == 0.0


def test_unclipped_sensitivity_is_the_mean_distance_to_the_best() -> None:
    assert lr_sensitivity([1.0, 2.0, 6.0]) == 2.0


def test_sensitivity_of_no_run_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="at least one loss"):
        lr_sensitivity([])
