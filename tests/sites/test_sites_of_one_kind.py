"""Layers that run the same operators are read and verified as one; a layer that differs in what decides is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import find_sites
from qkeel.heads.rows import features_used
from qkeel.heads.walk import names_of, walk
from qkeel.sites import AttentionSite, QKProduct, verify
from qkeel.sites.trace import traced

H, D, M, T = 4, 8, 16, 6


class Layer(nn.Module):
    """Self-attention whose heads are taken in the order of a buffer, and whose queries are multiplied by another."""

    def __init__(
        self, order: list[int] | None = None, gate: Tensor | None = None
    ) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(M, H * D) for _ in range(3))
        self.o = nn.Linear(H * D, M)
        self.register_buffer("order", torch.tensor(order or [0, 1, 2, 3]))
        self.register_buffer("gate", torch.ones(H * D) if gate is None else gate)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (H, D)).transpose(1, 2)
            for p in (self.q(x) * self.gate, self.k(x), self.v(x))
        )
        q = q[:, self.order]
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


def example() -> Tensor:
    return torch.randn(2, T, M, generator=torch.Generator().manual_seed(0))


def stack(*layers: Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def test_further_layers_of_a_kind_are_verified_in_fewer_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[str] = []
    logits = verify.Rerun.logits

    def counted(rerun: verify.Rerun, *args: object) -> list[Tensor]:
        runs.append(rerun.frame.name)
        return logits(rerun, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(verify.Rerun, "logits", counted)
    sites = find_sites(stack(*(Layer() for _ in range(4))), example())
    assert [site.verified for site in sites] == [True] * 4
    numbers = [runs.count(str(i)) for i in range(4)]
    assert numbers[1:] == [6, 6, 6]
    assert numbers[0] > 15


def rows_of_queries(site: AttentionSite) -> list[list[int]]:
    return site.query[0].index.tolist()


def test_a_layer_with_another_order_of_heads_has_its_own_rows() -> None:
    sites = find_sites(
        stack(*(Layer(order=[0, 2, 1, 3] if i % 2 else None) for i in range(4))),
        example(),
    )
    straight = torch.arange(H * D).view(H, D)
    for i, site in enumerate(sites):
        assert site.verified
        assert (
            rows_of_queries(site)
            == straight[[0, 2, 1, 3] if i % 2 else [0, 1, 2, 3]].tolist()
        )


@pytest.mark.parametrize(
    "gate",
    [
        (torch.arange(H * D) >= D).float(),  # no row makes head 0
        (torch.arange(H * D) % 2).float(),  # half of the rows make nothing
    ],
)
def test_a_layer_with_zeros_is_not_taken_for_one_of_the_same_kind(gate: Tensor) -> None:
    first, second, third = find_sites(
        stack(Layer(), Layer(gate=gate), Layer()), example()
    )
    assert first.verified
    assert third.verified
    if second.terms:  # half of the rows
        assert {row % 2 for head in rows_of_queries(second) for row in head} == {1}
    else:
        assert second.why


def test_wrong_rows_of_a_further_layer_are_seen() -> None:
    model = stack(Layer(), Layer())
    trace = traced(model, (example(),), {}, expected=True)
    first, second = trace.sites
    (term,) = second.terms
    query = dataclasses.replace(term.query[0], index=term.query[0].index[[1, 0, 2, 3]])
    wrong = dataclasses.replace(
        second, terms=(QKProduct(query=(query,), key=term.key),)
    )
    checked = trace.verified([first, wrong])
    assert checked[0].verified
    assert "changed the logits of heads" in checked[1].unverified


def test_shared_weights_have_their_first_name_in_every_layer() -> None:
    first, second = Layer(), Layer()
    second.q.weight = first.q.weight
    sites = find_sites(stack(first, second), example())
    assert [s.query[0].parameter for s in sites] == ["0.q.weight", "0.q.weight"]
    assert all(s.verified for s in sites)


def test_heads_without_a_number_are_filled() -> None:
    model = stack(Layer(), Layer())
    with torch.no_grad():
        model[1].q.weight[:D] = 0.0
    assert [site.verified for site in find_sites(model, example())] == [True, True]
    assert not model[1].q.weight[:D].any()


@pytest.mark.parametrize("heads", [3, 5, 64, 70])
def test_two_gradients_show_the_features_of_every_head(heads: int) -> None:
    """And none where two heads share one."""
    torch.manual_seed(0)
    layer, order = nn.Linear(8, heads * 2), torch.randperm(heads)
    model = nn.Sequential(layer)
    x = (
        model(torch.randn(2, 3, 8)).unflatten(-1, (heads, 2)).transpose(1, 2)[:, order]
        * 1.5
    )
    assert x.grad_fn is not None
    (projection,) = walk(x.grad_fn, set(), names_of(model)).nearest
    used = features_used(x, 1, projection)
    assert used is not None
    expected = torch.arange(heads * 2).view(heads, 2)[order]
    assert [row.nonzero().flatten().tolist() for row in used] == expected.tolist()
    mixed = x + x.roll(1, 1)
    assert features_used(mixed, 1, projection) is None
