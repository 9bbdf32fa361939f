"""LBFGS estimates curvature from how weights change: remedies that change them after its step refuse it."""

from __future__ import annotations

import pytest
import torch
from tests.contract.watch.small import batch, small

import qkeel
from qkeel.errors import RefusedError


@pytest.mark.parametrize("remedy", ["qk_clip:threshold=1", "lalr:tau=0.1"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_refused_by_name(remedy: str, search: str | None) -> None:
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=search)
    with pytest.raises(RefusedError, match="LBFGS"):
        qkeel.apply(model, remedy, optimizer, batch=batch(0))
    assert all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
