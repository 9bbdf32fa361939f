"""Remedies and statistics follow the key head that each query head uses, also where it is not the one of its block."""

from __future__ import annotations

import pytest
import torch
from tests.sites.test_layouts import GROUPS, Heads
from torch import Tensor, nn

import qkeel

USED = [0, 1, 0, 1]
TILED = ("tiled", "tiled, fused", "repeats first")


def model_of(name: str) -> tuple[nn.Module, Heads]:
    """The model, and the attention in it, its second and third head loud."""
    torch.manual_seed(0)
    heads = Heads(*GROUPS[name][:2])
    with torch.no_grad():
        for p, factor in zip(heads.q.weight.chunk(4), (1.0, 40.0, 15.0, 2.0)):
            p.mul_(factor)
    return nn.Sequential(heads), heads


def batch() -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TILED)
def test_lalr_slows_the_query_heads_that_use_a_key_head_and_that_key_head_by_its_worst_query_head(
    name: str,
) -> None:
    model, heads = model_of(name)
    model.double()  # steps of a loud head are lost in float32
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    start = heads.q.weight.detach().clone()
    with qkeel.apply(model, "lalr:tau=1", optimizer, batch=batch().double()):
        with torch.no_grad():
            heads.k.weight[8:].mul_(4)  # key head 1
            heads.q.weight[16:24].mul_(3)  # query head 2
        before = {n: p.detach().clone() for n, p in heads.named_parameters()}
        (model(batch().double()) ** 2).sum().backward()
        optimizer.step()

    def rates(name: str, n: int) -> Tensor:
        p = heads.get_parameter(name)
        assert p.grad is not None
        step, grad = (
            x.unflatten(0, (n, 8)).flatten(1)
            for x in (before[name] - p.detach(), p.grad)
        )
        return (step * grad).sum(1) / (grad * grad).sum(1) / 1e-5

    torch.testing.assert_close(
        rates("q.weight", 4),
        torch.tensor([1, 1 / 4, 1, 1 / 4]).double(),
        rtol=0.02,
        atol=0.0,
    )
    norms, now = (
        w.unflatten(0, (4, 8)).flatten(1).norm(dim=1)
        for w in (start, before["q.weight"])
    )
    worst = [norms[own].max() / now[own].max() for own in ([0, 2], [1, 3])]
    torch.testing.assert_close(
        rates("k.weight", 2), torch.stack(worst), rtol=0.02, atol=0.0
    )
