"""Attention over packed sequences, compiled and not, watched: python -m tests.spec.packed_compiled."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import qkeel
from qkeel import attention
from qkeel.spec import AttentionSpec, Rope

ENDS = ([0, 3, 3, 10, 12], [0, 1, 2, 9, 12], [0, 12])


class Packing(nn.Module):
    """Attention over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in "qkv")
        self.spec = AttentionSpec(position=Rope())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Width 16 in 2 heads."""
        q, k, v = (
            f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return (
            attention(q, k, v, spec=self.spec, cu_seqlens=ends)
            .transpose(1, 2)
            .flatten(2)
        )


def numbers(plain: Packing, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and gradients for all ends, and the largest logits that were watched."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    found = []
    with qkeel.watch(module, optimizer) as monitor:
        for ends in ENDS:
            optimizer.zero_grad()
            out = module(x, torch.tensor(ends, dtype=torch.int32))
            out.square().sum().backward()
            found += [
                out.detach(),
                *(p.grad.clone() for p in plain.parameters() if p.grad is not None),
            ]
            optimizer.step()
        top = monitor.history.top("max_logit")
    assert top is not None
    assert len(found) == len(ENDS) * 7
    assert len(top) == len(ENDS)
    assert all(map(math.isfinite, top))
    return [*found, torch.from_numpy(top.copy())]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain, x = Packing(), torch.randn(1, 12, 16)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    torch.testing.assert_close(numbers(plain, compiled, x), numbers(plain, plain, x))
