"""The report of a retrofit: how far the new model is from the old one, before and after the fit."""

from __future__ import annotations

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The distance between a changed model and the old model."""

    #: mean over tokens of KL(old ‖ new) of the predicted distributions, in nats; NaN if the outputs are no classes
    kl: float
    #: mean squared difference of the outputs, divided by the variance of the old ones; None if the outputs are classes
    error: float | None = None

    @property
    def distance(self) -> float:
        """The number that a retrofit makes small: the KL or the squared error."""
        return self.kl if self.error is None else self.error

    def __str__(self) -> str:
        if self.error is not None:
            return f"squared error {self.error:.4g} of the variance"
        return f"KL {self.kl:.4g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitReport:
    """The gap to the old model before and after the fit of a retrofit."""

    naive: Gap  #: with initial gains
    gap: Gap  #: with fitted gains
    held_out: str = ""  #: the data that was not fitted, on which the gaps are measured; "" if there was none

    def __str__(self) -> str:
        measured_on = (
            f"measured on {self.held_out}, which were not fitted"
            if self.held_out
            else "measured on the data that was fitted: one sequence leaves nothing to hold out"
        )
        return (
            f"{measured_on}\nnaive insertion: {self.naive}\ngains fitted:    {self.gap}"
        )
