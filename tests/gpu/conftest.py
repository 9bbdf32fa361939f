"""Each test starts from the same seed, here too where tests/conftest.py is not read, and every kernel may run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _each(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("QKEEL_TRITON", "unseen")
