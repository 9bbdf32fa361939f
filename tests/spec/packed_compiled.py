"""Attention over packed sequences, compiled and not, watched: python -m tests.spec.packed_compiled."""

import numpy as np
import torch
from tests.attention import from_heads
from tests.training import sgd
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel import attention
from qkeel.spec import AttentionSpec, Rope

ENDS = torch.tensor([[0, 3, 3, 10, 12], [0, 1, 2, 9, 12], [0, 0, 5, 5, 12]])
SPEC = AttentionSpec(position=Rope())


class Packing(nn.Module):
    """Attention over packed sequences, of width 16 in 2 heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, ends):
        """The heads side by side."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return from_heads(attention(q, k, v, spec=SPEC, cu_seqlens=ends))


def numbers(plain, module, x):
    """Outputs and gradients for all ends, and the largest logits that were watched."""
    optimizer, computed = sgd(plain, 0.0), []
    with qkeel.watch(module, optimizer) as monitor:
        for ends in ENDS:
            out = module(x, ends)
            gradients = torch.autograd.grad(out.square().sum(), [*plain.parameters()])
            computed += [out.detach(), *gradients]
            optimizer.step()
        top = torch.from_numpy(np.nanmax(monitor.history.heads["max_logit"], (1, 2)))
    assert top.isfinite().sum() == len(ENDS)
    return [*computed, top]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain, x = Packing(), torch.randn(1, 12, 16)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert_close(numbers(plain, compiled, x), numbers(plain, plain, x))
