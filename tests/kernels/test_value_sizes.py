"""Values of another size than queries keep the fused kernel, exactly."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel


class _Largest(TorchDispatchMode):
    """The most numbers in any tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("width", [4, 24])
def test_values_narrower_or_wider_than_queries_equal_the_oracle(width: int) -> None:
    q, k = torch.randn(2, 2, 4, 9, 16, dtype=torch.float64)
    v = torch.randn(2, 4, 9, width, dtype=torch.float64)
    spec = qkeel.preset("baseline")
    out = qkeel.attention(q, k, v, spec=spec, impl="sdpa")
    torch.testing.assert_close(out, qkeel.reference.attend(spec, q, k, v).out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [8, 32])
def test_values_of_another_size_make_no_square_matrix(width: int) -> None:
    t = 1024
    q, k, v = torch.randn(1, 1, t, 16), torch.randn(1, 1, t, 16), torch.randn(1, 1, t, width)
    with _Largest() as seen:
        qkeel.attention(q, k, v, spec=qkeel.AttentionSpec(), impl="sdpa")
    assert seen.numel < t * t / 8
