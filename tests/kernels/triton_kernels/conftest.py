"""The Triton kernels run here in Triton's interpreter, on CPU tensors."""

import pytest


@pytest.fixture(autouse=True)
def _interpreted(_triton): ...
