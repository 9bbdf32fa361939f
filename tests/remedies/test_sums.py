"""Remedies on a logit that is a sum of products act on all of them, or refuse."""

from __future__ import annotations

import re

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


def test_qk_lr_at_zero_moves_no_weight_of_the_logit() -> None:
    for name in SUMS:
        model = made(name)
        # Sites that are given are checked against the weights, some of them of three dimensions.
        sites = qkeel.find_sites(model, batch())
        qkeel.apply(
            model, "qk_lr:factor=0", torch.optim.SGD(model.parameters()), sites=sites
        ).remove()
        before = trained(model, "qk_lr:factor=0", lr=1e-3)
        moved = {
            n for n, p in model.named_parameters() if not torch.equal(p, before[n])
        }
        assert moved == {"v.weight"}


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


def test_a_norm_acts_on_every_product_or_is_refused() -> None:
    """Normed logits do not grow with the projections that make them, in any of the products."""
    done, refused = [], {}
    for name in SUMS:
        model = made(name)
        try:
            qkeel.apply(model, "qk_norm", batch=batch())
        except RefusedError as error:
            refused[name] = str(error)
            continue
        done.append(name)
        model(batch())
        before = model.z.detach()
        with torch.no_grad():
            for projection in model.names:
                model.get_submodule(projection).weight *= 3
        model(batch())
        torch.testing.assert_close(model.z, before, rtol=1e-3, atol=1e-3, msg=name)
    assert "two" in done
    for name, reason in refused.items():
        assert re.search(
            r"qk_norm at the model itself|multiplies queries and keys", reason
        ), name


@pytest.mark.parametrize("name", one_in(UNKNOWN, 2))
@pytest.mark.parametrize(
    "remedy", ["qk_clip", "lalr", "qk_lr", "spectral_cap", "qk_weight_decay", "qk_norm"]
)
def test_a_part_that_is_not_known_is_refused(name: str, remedy: str) -> None:
    model = unknown(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RefusedError, match=remedy):
        qkeel.apply(model, remedy, optimizer, batch=batch())
