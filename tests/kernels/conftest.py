"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _poisoned() -> Iterator[None]:
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
