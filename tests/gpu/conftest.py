"""Each test starts from the same seed, here too where tests/conftest.py is not read."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _each():
    torch.manual_seed(0)
