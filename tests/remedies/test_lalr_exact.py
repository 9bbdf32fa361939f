"""lalr against the obvious implementation: one parameter and one parameter group per head, its rate set each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.quick import quick
from torch import Tensor, nn

import qkeel
from qkeel.nn import MLA, Attention

from .models import Make, attention, gradients, mla, step_by

TAU, STEPS = 0.3, 50
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
    "adamw_fused": lambda p, lr: torch.optim.AdamW(
        p, lr=lr, weight_decay=0.1, fused=True
    ),
    "adamw_foreach": lambda p, lr: torch.optim.AdamW(
        p, lr=lr, weight_decay=0.1, foreach=True
    ),
    "adamw_amsgrad": lambda p, lr: torch.optim.AdamW(
        p, lr=lr, weight_decay=0.0, amsgrad=True
    ),
    "adam_l2": lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=0.1),
    "sgd": lambda p, lr: torch.optim.SGD(
        p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(
        p, lr=lr, momentum=0.5, weight_decay=0.1
    ),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, weight_decay=0.1),
    "nadam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "radam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
    "adadelta": lambda p, lr: torch.optim.Adadelta(p, lr=100 * lr),
}
Norms = dict[str, list[Tensor]]


@dataclasses.dataclass
class PerHead:
    """The obvious implementation: every head's rows a parameter and a group of their own."""

    model: nn.Module
    make: Make
    lr: float
    heads: dict[str, int]  # weight name -> number of heads
    rates: Callable[[Norms, Norms], dict[str, list[float]]]
    measure: Callable[[Tensor], Tensor] = torch.linalg.matrix_norm

    def __post_init__(self) -> None:
        self.parts = {
            name: [
                nn.Parameter(w.clone())
                for w in p.detach().chunk(self.heads.get(name, 1))
            ]
            for name, p in self.model.named_parameters()
        }
        groups = [{"params": [part]} for parts in self.parts.values() for part in parts]
        self.optimizer = self.make(groups, self.lr)
        self.start = self.norms()
        self.base = {id(g): g["lr"] for g in self.optimizer.param_groups}

    def norms(self) -> Norms:
        return {
            name: [self.measure(w.detach()) for w in self.parts[name]]
            for name in self.heads
        }

    def step(self, grads: dict[str, Tensor], schedule: float = 1.0) -> None:
        rates = self.rates(self.start, self.norms())
        group = iter(self.optimizer.param_groups)
        for name, parts in self.parts.items():
            for h, (part, g) in enumerate(zip(parts, grads[name].chunk(len(parts)))):
                part.grad = g.clone()
                one = next(group)
                one["lr"] = (
                    schedule
                    * self.base[id(one)]
                    * (TAU * rates[name][h] if name in rates else 1.0)
                )
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: torch.cat([p.detach() for p in parts])
            for name, parts in self.parts.items()
        }


def gqa_rates(start: Norms, now: Norms) -> dict[str, list[float]]:
    """Algorithm 1, with the rule for grouped keys."""
    q0, k0, q, k = (
        n[w] for n in (start, now) for w in ("q_proj.weight", "k_proj.weight")
    )
    per = len(q) // len(k)
    return {
        "q_proj.weight": [float(k0[h // per] / k[h // per]) for h in range(len(q))],
        "k_proj.weight": [
            float(max(q0[g * per : (g + 1) * per]) / max(q[g * per : (g + 1) * per]))
            for g in range(len(k))
        ],
    }


def mla_rates(
    start: Norms, now: Norms, latent_norm: bool = False
) -> dict[str, list[float]]:
    """Algorithm 2, line by line; a norm on the latents takes the down-projections out."""

    def f(n: Norms) -> dict[str, list[float]]:
        uq, qr, uk, kr = (
            n[f"{w}.weight"] for w in ("q_up", "q_rope", "k_up", "k_rope")
        )
        one = [torch.ones((), dtype=uq[0].dtype)]
        dq, dkv = (
            (one, one) if latent_norm else (n["q_down.weight"], n["kv_down.weight"])
        )
        heads = range(len(uq))
        found = {
            "q_up.weight": [float(1 / (dq[0] * uk[h] * dkv[0])) for h in heads],
            "k_up.weight": [float(1 / (uq[h] * dq[0] * dkv[0])) for h in heads],
            "q_rope.weight": [float(1 / (dq[0] * kr[0])) for h in heads],
            "k_rope.weight": [float(1 / max(qr[h] * dq[0] for h in heads))],
        }
        if not latent_norm:
            nope, rope = (
                max(uq[h] * uk[h] * dkv[0] for h in heads),
                max(qr[h] * kr[0] for h in heads),
            )
            found["q_down.weight"] = [float(min(1 / nope, 1 / rope))]
            found["kv_down.weight"] = [
                float(1 / max(uq[h] * dq[0] * uk[h] for h in heads))
            ]
        return found

    a, b = f(start), f(now)
    return {name: [y / x for x, y in zip(a[name], b[name])] for name in a}


def compare(a: nn.Module, reference: PerHead, tolerance: float) -> None:
    for name, weight in reference.weights().items():
        own = a.get_parameter(name).detach()
        assert (own - weight).abs().max() <= tolerance * weight.abs().max(), name


def per_head(model: Attention | MLA, make: Make, lr: float, **options: Any) -> PerHead:
    if isinstance(model, MLA):
        heads = {
            "q_up.weight": 4,
            "q_rope.weight": 4,
            "k_up.weight": 4,
            "k_rope.weight": 1,
        }
        heads |= {} if model.latent_norm else {"q_down.weight": 1, "kv_down.weight": 1}
        rates = lambda a, b: mla_rates(a, b, model.latent_norm)  # noqa: E731
        return PerHead(model, make, lr, heads, rates, **options)
    return PerHead(
        model,
        make,
        lr,
        {"q_proj.weight": 4, "k_proj.weight": model.n_kv_heads},
        gqa_rates,
        **options,
    )


@pytest.mark.parametrize(
    "dtype",
    quick([torch.float64, torch.float32], lambda dtype: dtype is torch.float64),
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kv_heads", quick([4, 2, 1], (2).__eq__))
def test_equals_one_parameter_per_head(
    name: str, dtype: torch.dtype, kv_heads: int
) -> None:
    model, make = attention(dtype, kv_heads, bias=True), OPTIMIZERS[name]
    reference, optimizer = per_head(model, make, 0.01), make(model.parameters(), 0.01)
    with qkeel.apply(model, "lalr", optimizer, tau=TAU):
        for grads in gradients(model, STEPS):
            step_by(model, optimizer, grads)
            reference.step(grads)
    compare(model, reference, 1e-12 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("latent_norm", [False, True])
@pytest.mark.parametrize("name", ["adamw_fused", "sgd"])
def test_mla_equals_one_parameter_per_head(name: str, latent_norm: bool) -> None:
    model, make = mla(latent_norm=latent_norm).double(), OPTIMIZERS[name]
    reference, optimizer = per_head(model, make, 0.01), make(model.parameters(), 0.01)
    with qkeel.apply(model, "lalr", optimizer, tau=TAU):
        for grads in gradients(model, STEPS):
            step_by(model, optimizer, grads)
            reference.step(grads)
    compare(model, reference, 1e-12)


def test_spectral_norm_equals_one_parameter_per_head() -> None:
    model, make = attention(), OPTIMIZERS["adamw"]
    reference = per_head(
        model, make, 0.01, measure=lambda w: torch.linalg.matrix_norm(w, ord=2)
    )
    optimizer = make(model.parameters(), 0.01)
    with qkeel.apply(model, "lalr:norm=spectral", optimizer, tau=TAU):
        for grads in gradients(model, STEPS):
            step_by(model, optimizer, grads)
            reference.step(grads)
    compare(model, reference, 1e-12)


def test_muon_orthogonalises_the_whole_matrix_and_lalr_scales_rows_of_that_update() -> (
    None
):
    # Per head would be another optimizer. The obvious implementation: a copy of the whole matrix per head, stepped
    # at that head's rate, of which only that head's rows are kept.
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site = attention(n_kv_heads=4)

    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=lr, weight_decay=0.1)

    model = Two()
    optimizer = make(model.parameters(), 0.02)
    names = ("site.q_proj.weight", "site.k_proj.weight")
    start = {n: model.get_parameter(n).detach().clone() for n in names}
    copies = {n: [nn.Parameter(start[n].clone()) for _ in range(4)] for n in names}
    own = {n: [make([c], 0.02) for c in copies[n]] for n in names}

    def sizes(w: Tensor) -> list[Tensor]:
        return [torch.linalg.matrix_norm(x) for x in w.chunk(4)]

    with qkeel.apply(model, "lalr", optimizer, tau=TAU):
        for grads in gradients(model, 20):
            step_by(model, optimizer, grads)
            now = {n: copies[n][0].detach().clone() for n in names}
            for n, partner in (names, names[::-1]):
                for h, (copy, o) in enumerate(zip(copies[n], own[n])):
                    o.param_groups[0]["lr"] = float(
                        0.02 * TAU * sizes(start[partner])[h] / sizes(now[partner])[h]
                    )
                    copy.grad = grads[n].clone()
                    o.step()
            for n in names:
                whole = torch.cat(
                    [c.detach().chunk(4)[h] for h, c in enumerate(copies[n])]
                )
                for c in copies[n]:
                    c.data.copy_(whole)
    for n in names:
        assert (model.get_parameter(n) - copies[n][0]).abs().max() <= 1e-12
