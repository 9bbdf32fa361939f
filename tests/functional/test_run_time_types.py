"""The suite's own check of annotations: a wrong call is refused, the first one as well as one after others."""

from __future__ import annotations

import dataclasses

import pytest
import run_time_types
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from qkeel.functional.norms import rms_norm
from qkeel.functional.rope import rotate


@run_time_types.checked
def sum_of(x: Float[Tensor, " n"], y: Float[Tensor, " n"], cut: int) -> Float[Tensor, " n"]:
    return (x + y)[cut:]


@run_time_types.checked
@dataclasses.dataclass
class Pair:
    x: Float[Tensor, " n"]
    y: Float[Tensor, " n"]


def test_what_is_wrong_is_refused_before_and_after_what_is_right() -> None:
    for n in (2, 3, 2):
        with pytest.raises(TypeCheckError, match="parameters"):
            sum_of(torch.ones(n), torch.ones(n + 1), 0)
        assert sum_of(torch.ones(n), torch.ones(n), 0).tolist() == [2.0] * n
        with pytest.raises(TypeCheckError, match="return value"):
            sum_of(torch.ones(n), torch.ones(n), 1)
        with pytest.raises(TypeCheckError):
            sum_of(torch.ones(n), torch.ones(n, dtype=torch.int64), 0)
        with pytest.raises(TypeCheckError):
            sum_of(torch.ones(n), torch.ones(n), 0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeCheckError):
            Pair(torch.ones(n), torch.ones(n + 1))
        assert len(Pair(torch.ones(n), torch.ones(n)).x) == n


def test_the_formulas_are_checked() -> None:
    assert rms_norm(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(TypeCheckError):
        rms_norm(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(TypeCheckError):
        rotate(torch.ones(1, 2, 3, 4), torch.ones(3, 2), torch.ones(3, 2), pairing="thirds")  # type: ignore[arg-type]
