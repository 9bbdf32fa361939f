"""Where operators are looked at, what torch compiles or traces is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contract.watch.test_watch_promises import (
    IN_ONE_PIECE,
    trained_layers,
    written_out,
)
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention


def through_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q.detach(), k.detach(), v.detach())  # type: ignore[return-value] # on a CPU it has no gradients


@pytest.mark.filterwarnings(
    *(
        "ignore::UserWarning:torch",
        "ignore::DeprecationWarning:torch",
        "ignore:The .grad attribute",
    ),
    "ignore:flex_attention called without torch.compile",
)
@pytest.mark.parametrize("other", [IN_ONE_PIECE, through_flex])
def test_weights_are_those_of_the_unwatched_run(other: Callable[..., Any]) -> None:
    ways = (written_out, other)
    assert all(
        map(torch.equal, trained_layers(ways, True), trained_layers(ways, False))
    )
