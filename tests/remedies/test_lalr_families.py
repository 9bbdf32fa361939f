"""lalr on models nobody prepared, against one parameter and one group per head, heads and factors written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.quick import one_in, quick
from torch import Tensor, nn

import qkeel

from .families import FAMILIES, LAYERS, Layer, OneByOne, Part, batch, tower
from .models import Make, gradients, step_by

TAU, STEPS = 0.3, 50
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1, fused=True),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
}
Sizes = dict[Part, float]


def norms(model: nn.Module, layer: Layer) -> Sizes:
    return {p: float(p.of(model).norm()) for p in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope)}


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

    def __init__(self, model: nn.Module, layers: list[Layer], make: Make, lr: float) -> None:
        self.layers, self.lr = layers, lr
        heads = [p for layer in layers for p in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope)]
        self.parts: dict[Part, nn.Parameter] = {}
        for name in {p.name for p in heads}:
            size = {p.axis: model.get_parameter(name).shape[p.axis] for p in heads if p.name == name}
            ((axis, n),) = size.items()
            taken = {i for p in heads if p.name == name for i in p.index}
            rest = tuple(i for i in range(n) if i not in taken)
            every = [p for p in heads if p.name == name] + ([Part(name, rest, axis)] if rest else [])
            self.parts.update({p: nn.Parameter(p.of(model).clone()) for p in every})
        self.groups = {p: {"params": [w]} for p, w in self.parts.items()}
        self.optimizer = make(list(self.groups.values()), lr)
        self.start = self.sizes()

    def sizes(self) -> Sizes:
        return {p: float(w.detach().norm()) for p, w in self.parts.items()}

    def step(self, grads: dict[str, Tensor], schedule: float = 1.0) -> None:
        now = self.sizes()
        factor = {p: TAU * f for layer in self.layers for p, f in rates(layer, self.start, now)}
        for group, (p, w) in zip(self.optimizer.param_groups, self.parts.items()):
            group["lr"] = schedule * self.lr * factor.get(p, 1.0)
            w.grad = grads[p.name].index_select(p.axis, torch.tensor(p.index))
        self.optimizer.step()

    def compare(self, model: nn.Module, tolerance: float) -> None:
        for p, w in self.parts.items():
            own = p.of(model)
            assert (own - w).abs().max() <= tolerance * w.abs().max(), p


def some(grads: dict[str, Tensor], outside: Outside) -> dict[str, Tensor]:
    return {name: g for name, g in grads.items() if name in {p.name for p in outside.parts}}


def step_some(model: nn.Module, optimizer: torch.optim.Optimizer, grads: dict[str, Tensor]) -> None:
    for name, g in grads.items():
        model.get_parameter(name).grad = g.clone()
    optimizer.step()


@pytest.mark.parametrize(
    "dtype", quick([torch.float64, torch.float32], lambda dtype: dtype is torch.float64), ids=["fp64", "fp32"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", one_in(FAMILIES, 2))
def test_equals_one_parameter_and_one_group_per_head(family: str, optimizer: str, dtype: torch.dtype) -> None:
    model, make = FAMILIES[family].model(dtype), OPTIMIZERS[optimizer]
    outside, own = Outside(model, FAMILIES[family].layers(), make, 0.01), make(model.parameters(), 0.01)
    with qkeel.apply(model, "lalr", own, tau=TAU, batch=batch()):
        for grads in gradients(model, STEPS):
            chosen = some(grads, outside)
            step_some(model, own, chosen)
            outside.step(chosen)
    outside.compare(model, 1e-12 if dtype == torch.float64 else 5e-6)


def one_by_one(i: int) -> Layer:
    q, k = ([Part(f"{i + 1}.{side}.{h}.weight", tuple(range(8))) for h in range(4)] for side in ("query", "key"))
    return Layer(f"{i + 1}", q, k)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_muon_where_heads_are_separate_matrices(rule: str) -> None:
    torch.manual_seed(0)
    model = tower(OneByOne).double()
    layers = [one_by_one(i) for i in range(LAYERS)]

    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=lr, weight_decay=0.1, adjust_lr_fn=rule)

    outside = Outside(model, layers, make, 0.02)
    own = make([p for p in model.parameters() if p.ndim == 2], 0.02)
    with qkeel.apply(model, "lalr", own, tau=TAU, batch=batch()):
        for grads in gradients(model, STEPS):
            chosen = some(grads, outside)
            step_some(model, own, chosen)
            outside.step(chosen)
    outside.compare(model, 1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_a_schedule_and_groups_of_their_own_change_nothing_about_exactness(family: str) -> None:
    model, make = FAMILIES[family].model(), OPTIMIZERS["adamw"]
    layers = FAMILIES[family].layers()
    outside = Outside(model, layers, make, 0.02)
    others = [p for n, p in model.named_parameters() if n not in {q.name for q in outside.parts}]
    heads = [model.get_parameter(n) for n in {q.name for q in outside.parts}]
    own = make([{"params": others, "lr": 0.5}, {"params": heads, "lr": 0.02}], 0.1)
    shape = [min(1.0, (i + 1) / 5) * (1 - i / STEPS) for i in range(STEPS)] + [0.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda i: shape[i])
    with qkeel.apply(model, "lalr", own, tau=TAU, batch=batch()):
        for i, grads in enumerate(gradients(model, STEPS)):
            chosen = some(grads, outside)
            step_some(model, own, chosen)
            outside.step(chosen, shape[i])
            scheduler.step()
    outside.compare(model, 1e-12)


def factors(family: str, change: Callable[[Layer], list[tuple[Part, float]]]) -> tuple[dict[Part, float], Layer]:
    """Rates of the first layer's parts after some of them grew, read off one step of plain SGD."""
    model, layer = FAMILIES[family].model(), FAMILIES[family].layer(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with qkeel.apply(model, "lalr:tau=1", optimizer, batch=batch()):
        with torch.no_grad():
            for part, factor in change(layer):
                rows = torch.tensor(part.index)
                p = model.get_parameter(part.name)
                p.index_copy_(part.axis, rows, p.index_select(part.axis, rows) * factor)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        step_by(model, optimizer, {n: torch.ones_like(p) for n, p in model.named_parameters()})
    found = {}
    for part in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope):
        moved = (before[part.name] - model.get_parameter(part.name).detach()) / 0.5
        one = moved.index_select(part.axis, torch.tensor(part.index))
        assert torch.allclose(one, one.flatten()[0])
        found[part] = float(one.flatten()[0])
    return found, layer


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v3 without a query latent"])
def test_golden_o17_latent_attention_with_norms_on_the_latents(family: str) -> None:
    found, layer = factors(family, lambda x: [(q, 2.0) for q in x.q])
    assert [found[p] for p in layer.q] == pytest.approx([1] * 4)
    assert [found[p] for p in layer.k] == pytest.approx([0.5] * 4)
    assert [found[p] for p in (*layer.q_rope, *layer.k_rope)] == pytest.approx([1] * 5)
    found, layer = factors(family, lambda x: [(x.q_rope[2], 8.0), (x.k_rope[0], 4.0), (x.k[1], 2.0)])
    assert [found[p] for p in layer.q] == pytest.approx([1, 0.5, 1, 1])
    assert [found[p] for p in layer.q_rope] == pytest.approx([0.25] * 4)
    model = FAMILIES[family].model()
    sizes = [float(p.of(model).norm()) for p in layer.q_rope]
    assert found[layer.k_rope[0]] == pytest.approx(max(sizes) / max(8 * sizes[2], *sizes))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_query_or_key_moves_as_without_lalr(family: str) -> None:
    plain, model = FAMILIES[family].model(torch.float32), FAMILIES[family].model(torch.float32)
    for m, name in ((plain, "none"), (model, "lalr:tau=0.1")):
        optimizer = OPTIMIZERS["adamw"](m.parameters(), 0.01)
        with qkeel.apply(m, name, optimizer, batch=batch()):
            for grads in gradients(m, 3):
                step_by(m, optimizer, grads)
    parts = {p.name: set() for layer in FAMILIES[family].layers() for p in (*layer.q, *layer.k)}
    for layer in FAMILIES[family].layers():
        for p in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope):
            parts.setdefault(p.name, set()).update(p.index)
    axis = 1 if family == "gpt2" else 0
    for name, p in model.named_parameters():
        other = plain.get_parameter(name)
        rest = torch.tensor(
            [i for i in range(p.shape[-1] if axis and p.ndim > 1 else len(p)) if i not in parts.get(name, ())]
        )
        if len(rest) and name in parts:
            assert torch.equal(p.index_select(axis, rest), other.index_select(axis, rest)), name
        elif name not in parts:
            assert torch.equal(p, other), name
