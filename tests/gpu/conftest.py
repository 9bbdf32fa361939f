"""Each test starts from the same seed, here too where tests/conftest.py is not read, and every kernel may run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _each(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("QKEEL_TRITON", "unseen")
