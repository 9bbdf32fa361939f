"""Remedies on steps act on the rows of queries and keys in every layout of the table, and leave all else bit for bit."""

import dataclasses

import pytest
import torch
from tests.attention import values
from tests.sites.models import CASES
from tests.training import adamw, sgd, step
from torch.testing import assert_close

import qkeel
from qkeel.sites import Tap

from .models import decoder, train

# Clips and rates need weights that the logits are proportional to.
LAYOUTS = [
    *("written", "thirds", "interleaved per head", "heads innermost", "columns"),
    *("grouped keys", "tiled keys, fused", "one key head", "joined biases", "einsums"),
    *("latent", "a sum of products", "queries that are keys", "convolutions"),
    *("nn.MultiheadAttention", "cross attention"),
]


def made(name):
    """A model in float64, its input, and which numbers of its weights are rows of queries or keys."""
    case = dataclasses.replace(CASES[name], dtype=torch.float64)
    model, masks = case.model(), {}
    for parameter, axis, index in (
        r for path in (*case.query, *case.key) for r in path
    ):
        weight = model.get_parameter(parameter)
        mask = masks.setdefault(parameter, torch.zeros_like(weight, dtype=torch.bool))
        lines = mask.flatten(1) if axis == 0 else mask.flatten(1).mT
        lines[index.flatten()] = True
    return model, case.x(), masks


def stepped(model, optimizer):
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


@pytest.mark.parametrize(
    ("remedy", "share", "make"),
    [
        ("frozen_qk", 0.0, lambda p: torch.optim.Rprop(p, lr=0.3)),
        ("qk_lr:factor=0.25", 0.25, lambda p: torch.optim.AdamW(p, lr=0.3, fused=True)),
    ],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_queries_and_keys_take_their_share_of_the_step_and_others_all(
    name, remedy, share, make
):
    model, x, masks = made(name)
    plain, _, _ = made(name)
    old = values(model)
    optimizer = make(model.parameters())
    with qkeel.apply(model, remedy, optimizer, batch=x):
        stepped(model, optimizer)
    stepped(plain, make(plain.parameters()))
    for n, full in plain.named_parameters():
        p, rows = model.get_parameter(n), masks.get(n, torch.zeros_like(full) > 0)
        # What queries and keys alone are computed from is frozen with them: biases, the convolution before a norm.
        is_theirs = full.ndim < 2 or n.startswith(("query.", "key."))
        if share or not is_theirs:
            assert torch.equal(p[~rows], full[~rows]), n
        assert (full[rows] != old[n][rows]).all()
        near = old[n] + share * (full - old[n])
        assert_close(p[rows], near[rows], rtol=1e-12, atol=1e-14)


def largest(model, x, sites):
    with torch.no_grad(), Tap(model) as tap:
        tap.sites = sites
        model(x)
        (stats,) = tap.read().values()
    return stats.max_logit


@pytest.mark.parametrize("groups", ["query", "group"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_clip_brings_each_head_or_the_worst_of_a_group_to_the_threshold(name, groups):
    model, x, masks = made(name)
    model.eval()
    old = values(model)
    sites = [*qkeel.find_sites(model, x)]
    before = largest(model, x, sites)
    tau = float(before.mean())
    optimizer = sgd(model, 0.0)
    remedy = f"qk_clip:threshold={tau},groups={groups}"
    with qkeel.apply(model, remedy, optimizer, batch=x):
        step(model, optimizer, x)
    gamma = (tau / before).clamp(max=1)
    if groups == "group":
        heads, keys = CASES[name].heads
        key_of = CASES[name].key_heads or [h * keys // heads for h in range(heads)]
        gamma = torch.stack([gamma[torch.tensor(key_of) == g].min() for g in key_of])
    assert_close(largest(model, x, sites), before * gamma)
    for n, p in model.named_parameters():
        others = ~masks.get(n, torch.full_like(p, p.ndim < 2) > 0)
        assert torch.equal(p[others], old[n][others]), n


def test_gains_of_norms_on_queries_and_keys_are_frozen_and_those_of_values_are_not():
    model = decoder(spec=qkeel.preset("qwen3"))
    optimizer = adamw(model, 0.1)
    before = values(model)
    with qkeel.apply(model, "frozen_qk", optimizer):
        train(model, optimizer, 3)
    stay = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    sides = ("q_proj", "k_proj", "q_norm", "k_norm")
    assert stay == {n for n in before if any(side in n for side in sides)}
    assert len(stay) == 8
