"""functional_attention is F.scaled_dot_product_attention: its arguments, shapes, errors, and how it is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel
from qkeel.kernels.compiled_attention import Native
from qkeel.nn import functional_attention

MASK = torch.rand(2, 1, 13, 13) < 0.6
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], bool]] = {
    "causal": ((2, 4, 13, 16), (2, 4, 13, 16), {"is_causal": True}, True),
    "full, scaled": ((2, 4, 13, 16), (2, 4, 13, 16), {"scale": 0.5}, True),
    "grouped": ((2, 4, 13, 16), (2, 2, 13, 16), {"enable_gqa": True, "is_causal": True}, True),
    "mask": ((2, 4, 13, 16), (2, 4, 13, 16), {"attn_mask": MASK | torch.eye(13, dtype=torch.bool)}, True),
    "added": ((2, 4, 13, 16), (2, 4, 13, 16), {"attn_mask": torch.randn(13, 13)}, True),
    "more keys, causal": ((2, 4, 9, 16), (2, 4, 13, 16), {"is_causal": True}, True),
    "more queries, causal": ((2, 4, 13, 16), (2, 4, 9, 16), {"is_causal": True}, False),
    "one query": ((2, 4, 1, 16), (2, 4, 13, 16), {}, False),
    "three dimensions": ((4, 13, 16), (4, 13, 16), {"is_causal": True}, False),
    "odd width": ((2, 4, 13, 10), (2, 4, 13, 10), {}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    seen: list[object] = []
    inner = Native.__call__
    monkeypatch.setattr(Native, "__call__", lambda self, call: (seen.append(call), inner(self, call))[1])
    size, of_keys, how, ours = CALLS[name]
    for dtype, near in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        leaves = [torch.randn(s).to(dtype).requires_grad_() for s in (size, of_keys, of_keys)]
        given: dict[str, Any] = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.dtype != torch.bool else v for k, v in how.items()
        }
        found = []
        for function in (F.scaled_dot_product_attention, functional_attention):
            out = function(*leaves, **given)
            found.append([out, *torch.autograd.grad(out.float().cos().sum(), leaves)])
        for a, b in zip(*found):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert (a - b).abs().max() <= near * max(1.0, float(a.detach().abs().max()))
    assert bool(seen) is ours


def test_errors_are_torchs() -> None:
    q = torch.randn(1, 2, 3, 8)
    cases: tuple[tuple[Tensor, dict[str, Any]], ...] = (
        (q, {"attn_mask": torch.ones(5, 7)}),
        (q[..., :4], {}),
        (q[:, :1].double(), {}),
        (q.to("meta"), {}),
    )
    for k, how in cases:
        messages = []
        for function in (F.scaled_dot_product_attention, functional_attention):
            with pytest.raises((RuntimeError, ValueError)) as told:
                function(q, k, k, **how)
            messages.append(str(told.value))
        assert messages[0] == messages[1]


def test_a_mask_of_two_dimensions_is_one_of_pairs_though_the_batch_is_as_long() -> None:
    q, mask = torch.randn(3, 2, 3, 8), torch.tensor([[True, True, False], [True, False, True], [False, True, True]])
    assert torch.allclose(functional_attention(q, q, q, mask), F.scaled_dot_product_attention(q, q, q, mask), atol=1e-6)


class Model(nn.Module):
    """Attention as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(functional_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_a_model_that_calls_it_is_watched_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    model, x = Model(), 3 * torch.randn(2, 11, 32)
    (site,) = qkeel.find_sites(model, x)
    assert (site.n_heads, site.verified) == (4, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with qkeel.watch(model, optimizer, every=qkeel.monitor.Adaptive(least=2, most=9)) as monitor:
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
        assert monitor.active
        assert monitor._steps._bound._before is not None  # of the steps that were not measured
        assert monitor.read()


def test_compiled_it_is_one_graph() -> None:
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(functional_attention, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(q, q, q, is_causal=True), functional_attention(q, q, q, is_causal=True), atol=1e-6)
