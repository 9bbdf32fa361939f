"""The Triton kernels run here in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from qkeel.kernels.native import triton as available


@pytest.fixture(autouse=True)
def _interpreted(_triton: None) -> None: ...


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CPU tensors take the way of CUDA tensors; the dtypes of the passes over q and k that were made there."""
    monkeypatch.setattr(available, "usable", lambda device: available.loaded())
    seen: list[Any] = []
    from qkeel.kernels.logits import triton_extremes as extremes

    inner = extremes.extremes

    def counted(q: Tensor, k: Tensor, scale: float, **how: Any) -> Any:
        seen.append(q.dtype)
        return inner(q, k, scale, **how)

    monkeypatch.setattr(extremes, "extremes", counted)
    return seen
