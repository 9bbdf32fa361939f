"""Remedies on a logit that is a sum of products act on all of them, or refuse."""

from __future__ import annotations

import pytest
import torch

import qkeel
from qkeel.errors import RefusedError
from tests.sites.sums import SUMS, UNKNOWN, Sum, batch, largest, made, unknown

STEPS = 10


def trained(model: Sum, remedy: str, lr: float) -> dict[str, torch.Tensor]:
    """Ten steps of descent under a remedy; the weights before them."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with qkeel.apply(remedy, model, optimizer, example=batch()):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
    return before


def on_logit(name: str) -> set[str]:
    """The weights of a sum's logit."""
    return {f"{w}.weight" if w[0] in "qke" else w for t in SUMS[name][2] for side in t for w in side}


@pytest.mark.parametrize("name", SUMS)
def test_qk_clip_brings_the_whole_logit_to_the_threshold(name: str) -> None:
    model = made(name)
    assert largest(model) > 3
    trained(model, "qk_clip:threshold=1", lr=0.0)
    assert largest(model) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("name", SUMS)
def test_qk_lr_at_zero_moves_no_weight_of_the_logit(name: str) -> None:
    model = made(name)
    before = trained(model, "qk_lr:factor=0", lr=1e-3)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"v.weight"}


@pytest.mark.parametrize("name", SUMS)
@torch.no_grad()
def test_spectral_cap_caps_every_weight_of_the_logit(name: str) -> None:
    model = made(name)
    with torch.enable_grad():
        trained(model, "spectral_cap:cap=0.1", lr=0.0)
    norm = max(float(x.norm()) for x in batch().flatten(0, 1))
    # |z| of one product <= scale · cap² · ‖x‖ · ‖y‖, with y = 1 where the key is a table of positions.
    assert largest(model) <= len(SUMS[name][2]) * 0.25 * 0.01 * norm * norm
    for n in on_logit(name):
        heads = model.get_parameter(n).unflatten(0, (4, 8)) if n[0] in "qk" else model.get_parameter(n)[None]
        assert float(torch.linalg.matrix_norm(heads, 2).max()) <= 0.1 * (4 if n == "per_head" else 1) * (1 + 1e-4)


@pytest.mark.parametrize("name", SUMS)
def test_decay_shrinks_every_weight_of_the_logit(name: str) -> None:
    model = made(name)
    before = trained(model, "qk_weight_decay:decay=0.1", lr=1e-7)
    shrunk = {n for n, p in model.named_parameters() if not torch.equal(p, before[n]) and n != "v.weight"}
    assert shrunk == on_logit(name)


@pytest.mark.parametrize("name", SUMS)
def test_lalr_slows_every_weight_by_its_partners_over_all_products(name: str) -> None:
    """A weight that triples makes those that it is multiplied by take a third of the step."""
    rates = {}
    for factor in (1.0, 3.0):
        model = made(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with qkeel.apply("lalr:tau=1", model, optimizer, example=batch()):
            with torch.no_grad():
                model.k1.weight.mul_(factor)  # type: ignore[union-attr]
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            model(batch()).sum().backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        moved = {n: (before[n] - p.detach()) for n, p in model.named_parameters()}
        rates[factor] = {n: float((moved[n] * g).sum() / (g * g).sum()) / 1e-6 for n, g in grads.items()}
    partners = {f"{t[0][0]}.weight" for t in SUMS[name][2] if t[1] == ["k1"]}
    for n in on_logit(name):
        expected = 1 / 3 if n in partners else 1.0
        assert rates[3.0][n] / rates[1.0][n] == pytest.approx(expected, rel=0.1), n


@pytest.mark.parametrize("name", SUMS)
def test_a_norm_that_would_leave_a_product_out_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="qk_norm at the model itself|multiplies queries and keys"):
        qkeel.apply("qk_norm", made(name), example=batch())


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("remedy", ["qk_clip", "lalr", "qk_lr", "spectral_cap", "qk_weight_decay", "qk_norm"])
def test_a_part_that_is_not_known_is_refused(name: str, remedy: str) -> None:
    model = unknown(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RefusedError, match=remedy):
        qkeel.apply(remedy, model, optimizer, example=batch())
