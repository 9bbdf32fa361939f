"""lalr on models nobody prepared, against one parameter and one group per head, heads and factors written by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.quick import one_in, quick
from torch import Tensor, nn

import qkeel

from .families import FAMILIES, Layer, Part, batch
from .models import Make, gradients

TAU, STEPS = 0.3, 50
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1, fused=True),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
}
Sizes = dict[Part, float]


def norms(model: nn.Module, layer: Layer) -> Sizes:
    return {
        p: float(p.of(model).norm())
        for p in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope)
    }


def rates(layer: Layer, start: Sizes, now: Sizes) -> Iterator[tuple[Part, float]]:
    """Algorithm 1, for groups too; with latent norms algorithm 2 without the down-projections."""
    per = len(layer.q) // len(layer.k)
    for h, q in enumerate(layer.q):
        yield q, start[layer.k[h // per]] / now[layer.k[h // per]]
    for g, k in enumerate(layer.k):
        group = layer.q[g * per : (g + 1) * per]
        yield k, max(start[q] for q in group) / max(now[q] for q in group)
    for q in layer.q_rope:
        yield q, start[layer.k_rope[0]] / now[layer.k_rope[0]]
    for k in layer.k_rope:
        yield k, max(start[q] for q in layer.q_rope) / max(now[q] for q in layer.q_rope)


class Outside:
    """One parameter and one group per head; whatever a parameter holds besides heads is one part more."""

    def __init__(
        self, model: nn.Module, layers: list[Layer], make: Make, lr: float
    ) -> None:
        self.layers, self.lr = layers, lr
        heads = [
            p
            for layer in layers
            for p in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope)
        ]
        self.parts: dict[Part, nn.Parameter] = {}
        for name in {p.name for p in heads}:
            size = {
                p.axis: model.get_parameter(name).shape[p.axis]
                for p in heads
                if p.name == name
            }
            ((axis, n),) = size.items()
            taken = {i for p in heads if p.name == name for i in p.index}
            rest = tuple(i for i in range(n) if i not in taken)
            every = [p for p in heads if p.name == name] + (
                [Part(name, rest, axis)] if rest else []
            )
            self.parts.update({p: nn.Parameter(p.of(model).clone()) for p in every})
        self.groups = {p: {"params": [w]} for p, w in self.parts.items()}
        self.optimizer = make(list(self.groups.values()), lr)
        self.start = self.sizes()

    def sizes(self) -> Sizes:
        return {p: float(w.detach().norm()) for p, w in self.parts.items()}

    def step(self, grads: dict[str, Tensor], schedule: float = 1.0) -> None:
        now = self.sizes()
        factor = {
            p: TAU * f
            for layer in self.layers
            for p, f in rates(layer, self.start, now)
        }
        for group, (p, w) in zip(self.optimizer.param_groups, self.parts.items()):
            group["lr"] = schedule * self.lr * factor.get(p, 1.0)
            w.grad = grads[p.name].index_select(p.axis, torch.tensor(p.index))
        self.optimizer.step()

    def compare(self, model: nn.Module, tolerance: float) -> None:
        for p, w in self.parts.items():
            own = p.of(model)
            assert (own - w).abs().max() <= tolerance * w.abs().max(), p


def some(grads: dict[str, Tensor], outside: Outside) -> dict[str, Tensor]:
    return {
        name: g for name, g in grads.items() if name in {p.name for p in outside.parts}
    }


def step_some(
    model: nn.Module, optimizer: torch.optim.Optimizer, grads: dict[str, Tensor]
) -> None:
    for name, g in grads.items():
        model.get_parameter(name).grad = g.clone()
    optimizer.step()


@pytest.mark.parametrize(
    "dtype",
    quick([torch.float64, torch.float32], lambda dtype: dtype is torch.float64),
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", one_in(FAMILIES, 2))
def test_equals_one_parameter_and_one_group_per_head(
    family: str, optimizer: str, dtype: torch.dtype
) -> None:
    model, make = FAMILIES[family].model(dtype), OPTIMIZERS[optimizer]
    outside, own = (
        Outside(model, FAMILIES[family].layers(), make, 0.01),
        make(model.parameters(), 0.01),
    )
    with qkeel.apply(model, "lalr", own, tau=TAU, batch=batch()):
        for grads in gradients(model, STEPS):
            chosen = some(grads, outside)
            step_some(model, own, chosen)
            outside.step(chosen)
    outside.compare(model, 1e-12 if dtype == torch.float64 else 5e-6)
