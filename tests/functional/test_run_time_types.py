"""The suite checks annotations: a wrong call of a formula is refused, the first one as well as one after others."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from qkeel.functional.norms import rms_norm
from qkeel.functional.rope import rotate


def test_the_formulas_are_checked() -> None:
    for _ in range(2):
        assert rms_norm(torch.ones(2, 4)).shape == (2, 4)
        assert rms_norm(torch.ones(2, 4), 1).shape == (2, 4)  # an int is a float
        with pytest.raises(TypeCheckError):
            rms_norm(torch.ones(2, 4, dtype=torch.int64))
        with pytest.raises(TypeCheckError):
            rotate(
                torch.ones(1, 2, 3, 4),
                torch.ones(3, 2),
                torch.ones(3, 2),
                pairing="thirds",
            )  # type: ignore[arg-type]
