"""A module that another thread calls while it runs is observed in the thread of the pass alone."""

import threading

import torch
from tests.attention import from_heads
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import qkeel


class Twice(nn.Module):
    """Attention that another thread calls in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=self, args=(x.detach() * 9,))
            thread.start()
            thread.join()
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return from_heads(scaled_dot_product_attention(q, k, v))


def test_only_calls_of_the_pass_are_read_and_all_of_them():
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), Twice()).double()
    with qkeel.watch(model) as monitor:
        for _ in range(7):
            x = torch.randn(2, 5, 8, dtype=torch.float64)
            model(x).sum().backward()
            first, second = monitor.read().values()
            q, k, _ = model[0].qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            logits = (q @ k.mT / 2).detach()
            assert_close(first.max_logit, logits.amax((0, 2, 3)))
            assert first.n_queries.tolist() == second.n_queries.tolist() == [10, 10]
        assert monitor.active
