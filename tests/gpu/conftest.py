"""Each test starts from the same seed, here too where tests/conftest.py is not read."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
