"""Layers that run the same operators are read and verified as one; a layer that differs in what decides is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import find_sites
from qkeel.heads import verification
from qkeel.heads.rows import features_used
from qkeel.heads.walk import names_of, walk
from qkeel.sites import trace

H, D, M, T = 4, 8, 16, 6


class Layer(nn.Module):
    """Self-attention whose heads are taken in the order of a buffer, and whose queries are multiplied by another."""

    def __init__(self, order: list[int] | None = None, gate: Tensor | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(M, H * D) for _ in range(3))
        self.o = nn.Linear(H * D, M)
        self.register_buffer("order", torch.tensor(order or [0, 1, 2, 3]))
        self.register_buffer("gate", torch.ones(H * D) if gate is None else gate)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q(x) * self.gate, self.k(x), self.v(x)))
        q = q[:, self.order]
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def example() -> Tensor:
    return torch.randn(2, T, M, generator=torch.Generator().manual_seed(0))


def stack(*layers: Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sites whose weights were looked for."""
    found: list[str] = []
    look = trace._site

    def noted(calls: list[trace.CapturedCall], *rest: object) -> object:
        found.append(calls[0].name)
        return look(calls, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(trace, "_site", noted)
    return found


def by_itself(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What is found where no site is taken for another's kind."""
    with monkeypatch.context() as patch:
        patch.setattr(verification.Verification, "another", lambda *_: None)
        return known(model)


def known(model: nn.Module) -> list[tuple[object, ...]]:
    sites = find_sites(model, example())
    return [(s.name, s.n_heads, s.verified, s.unverified, str(s.terms), id(s.module)) for s in sites]


def test_equal_layers_are_read_once_and_as_if_each_was_read_alone(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(*(Layer() for _ in range(5)))
    found = known(model)
    assert read == ["0"]
    assert [verified for _, _, verified, *_ in found] == [True] * 5
    assert found == by_itself(model, monkeypatch)


@pytest.mark.parametrize(
    "other",
    [
        lambda: Layer(order=[0, 2, 1, 3]),  # other rows make head 1
        lambda: Layer(gate=(torch.arange(H * D) >= D).float()),  # no row makes head 0
        lambda: Layer(gate=(torch.arange(H * D) % 2).float()),  # half of the rows make nothing
    ],
)
def test_a_layer_with_other_indices_or_zeros_is_read_by_itself(
    other: Callable[[], Layer], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(Layer(), other(), Layer())
    found = known(model)
    assert {"0", "1"} <= {*read}
    assert found == by_itself(model, monkeypatch)
    assert found[0][2:5] != found[1][2:5]


def test_layers_of_two_kinds_that_take_turns_are_read_once_each(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(*(Layer(order=[0, 2, 1, 3] if i % 2 else None) for i in range(6)))
    found = known(model)
    assert read == ["0", "1"]
    assert found == by_itself(model, monkeypatch)


class Wired(nn.Module):
    """Self-attention that runs the same operators whatever its wiring, and whose queries may be made of its keys."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.q, self.k, self.m = (nn.Linear(M, M, bias=False) for _ in range(3))
        self.crossed = crossed

    def forward(self, x: Tensor) -> Tensor:
        k, q = self.k(x), self.q(x)
        q = self.m(k if self.crossed else q)
        q, k = (y.unflatten(-1, (H, M // H)).transpose(1, 2) for y in (q, k))
        return x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def test_a_layer_whose_operators_are_connected_otherwise_is_read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Wired(False), Wired(True), Wired(False))
    found = known(model)
    assert found == by_itself(model, monkeypatch)
    assert found[0][2:5] != found[1][2:5]


def test_shared_weights_have_their_first_name_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Layer(), Layer()
    second.q.weight = first.q.weight
    model = stack(first, second)
    sites = find_sites(model, example())
    assert [s.query[0].parameter for s in sites] == ["0.q.weight", "0.q.weight"]
    assert known(model) == by_itself(model, monkeypatch)


def test_heads_without_a_number_are_a_kind_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(Layer(), Layer())
    with torch.no_grad():
        model[1].q.weight[:D] = 0.0
    assert known(model) == by_itself(model, monkeypatch)


@pytest.mark.parametrize("heads", [3, 5, 64, 70])
def test_two_gradients_show_the_features_of_every_head(heads: int) -> None:
    """And none where two heads share one."""
    torch.manual_seed(0)
    layer, order = nn.Linear(8, heads * 2), torch.randperm(heads)
    model = nn.Sequential(layer)
    x = model(torch.randn(2, 3, 8)).unflatten(-1, (heads, 2)).transpose(1, 2)[:, order] * 1.5
    assert x.grad_fn is not None
    (projection,) = walk(x.grad_fn, set(), names_of(model)).nearest
    used = features_used(x, 1, projection, by_token=False)
    assert used is not None
    expected = torch.arange(heads * 2).view(heads, 2)[order]
    assert [torch.from_numpy(row).nonzero().flatten().tolist() for row in used] == expected.tolist()
    mixed = x + x.roll(1, 1)
    assert features_used(mixed, 1, projection, by_token=False) is None
