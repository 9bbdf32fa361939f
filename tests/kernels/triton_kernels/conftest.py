"""The Triton kernels run here in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _interpreted(_triton: None) -> None: ...
