"""The compiled kernels are on for the tests in here, and compiled once."""

import pytest


@pytest.fixture(autouse=True)
def _switched_on(_on): ...
