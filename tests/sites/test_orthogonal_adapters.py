"""An adapter that starts from two matrices whose product is zero, neither of which is: its rows are confirmed."""

from __future__ import annotations

import pytest
import torch
from tests.contract.watch.small import Small, batch
from torch import Tensor, nn

import qkeel


class Orthogonal(nn.Module):
    """W x + B A x, B A = 0 as in peft's init_lora_weights="orthogonal"."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        q, _ = torch.linalg.qr(torch.randn(base.in_features, base.in_features))
        mix = torch.linalg.qr(torch.randn(2 * rank, 2 * rank))[0]
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(mix[::2][:, :rank] @ q[:rank] / 10)
            u = torch.linalg.svd(self.a.weight)[0]
            self.a.weight.copy_(
                u[:, :1] @ u[:, :1].mT @ self.a.weight
            )  # of rank 1, B is orthogonal to it
            self.b.weight.copy_(torch.randn(base.out_features, rank - 1) @ u[:, 1:].mT)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted() -> Small:
    torch.manual_seed(0)
    model = Small()
    for block in model.blocks:
        block.q, block.k = Orthogonal(block.q), Orthogonal(block.k)
        assert (
            float((block.q.b.weight @ block.q.a.weight).detach().detach().abs().max())
            < 1e-6
        )
        assert (
            float(block.q.b.weight.detach().abs().max())
            > 0.1
            < 10 * float(block.q.a.weight.detach().abs().max())
        )
    return model


def test_rows_of_both_matrices_are_confirmed_and_nothing_is_changed() -> None:
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i, site in enumerate(qkeel.find_sites(model, batch(0))):
        assert site.unverified == ""
        assert {s.parameter for s in site.query} == {
            f"blocks.{i}.q.{part}.weight" for part in ("base", "a", "b")
        }
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("remedy", ["lalr:tau=0.1", "qk_clip:threshold=0.1"])
def test_remedies_on_steps_take_it(remedy: str) -> None:
    model = adapted()
    qkeel.apply(
        model, remedy, torch.optim.AdamW(model.parameters()), batch=batch(0)
    ).remove()
