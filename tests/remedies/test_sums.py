"""Remedies on a logit that is a sum of products act on all of them, or refuse."""

from __future__ import annotations

import pytest
import torch
from tests.quick import one_in
from tests.sites.sums import SUMS, UNKNOWN, Sum, batch, largest, made, unknown

import qkeel
from qkeel.errors import RefusedError

STEPS = 5


def trained(model: Sum, remedy: str, lr: float) -> dict[str, torch.Tensor]:
    """Ten steps of descent under a remedy; the weights before them."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with qkeel.apply(model, remedy, optimizer, batch=batch()):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
    return before


def on_logit(name: str) -> set[str]:
    """The weights of a sum's logit."""
    parameters = dict(made(name).named_parameters())
    return {
        w if w in parameters else f"{w}.weight"
        for t in SUMS[name][2]
        for side in t
        for w in side
    }


def test_qk_clip_brings_the_whole_logit_to_the_threshold() -> None:
    for name in SUMS:
        model = made(name)
        assert largest(model) > 3
        trained(model, "qk_clip:threshold=1", lr=0.0)
        assert largest(model) == pytest.approx(1.0, rel=1e-4)


@torch.no_grad()
def test_spectral_cap_caps_every_weight_of_the_logit() -> None:
    for name in SUMS:
        model = made(name)
        with torch.enable_grad():
            trained(model, "spectral_cap:cap=0.1", lr=0.0)
        norm = max(float(x.norm()) for x in batch().flatten(0, 1))
        # |z| of one product <= scale · cap² · ‖x‖ · ‖y‖, with y = 1 where the key is a table of positions.
        assert largest(model) <= len(SUMS[name][2]) * 0.25 * 0.01 * norm * norm
        (site,) = qkeel.find_sites(model, batch())
        assert {s.parameter for s in (*site.query, *site.key)} == on_logit(name)
        for s in (*site.query, *site.key):
            assert float(
                torch.linalg.matrix_norm(
                    s.heads(model.get_parameter(s.parameter)), 2
                ).max()
            ) <= 0.1 * (1 + 1e-4)


def test_decay_shrinks_every_weight_of_the_logit() -> None:
    for name in SUMS:
        model = made(name)
        before = trained(model, "qk_weight_decay:decay=0.1", lr=1e-7)
        shrunk = {
            n
            for n, p in model.named_parameters()
            if not torch.equal(p, before[n]) and n != "v.weight"
        }
        assert shrunk == on_logit(name)


@pytest.mark.parametrize("name", one_in(UNKNOWN, 2))
@pytest.mark.parametrize(
    "remedy", ["qk_clip", "lalr", "qk_lr", "spectral_cap", "qk_weight_decay", "qk_norm"]
)
def test_a_part_that_is_not_known_is_refused(name: str, remedy: str) -> None:
    model = unknown(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RefusedError, match=remedy):
        qkeel.apply(model, remedy, optimizer, batch=batch())
