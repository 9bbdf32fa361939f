"""A step under a remedy is the optimizer's own times a factor for each head, for any optimizer; factors by hand."""

import pytest
import torch
from tests.attention import values
from tests.training import adamw, sgd
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.remedies import REMEDIES

from .models import (
    OPTIMIZERS,
    attention,
    gradients,
    matrices,
    mla,
    optimizer_of,
    step_by,
)

TAU = 0.3


def qk_factors(start, now):
    """Algorithm 1 with grouped keys: 4 query heads, 2 key heads; norms by name."""
    q0, k0, q, k = (n[w] for n in (start, now) for w in ("q", "k"))
    groups = [x.view(2, 2).amax(1) for x in (q0, q)]
    return {"q": (k0 / k).repeat_interleave(2), "k": groups[0] / groups[1]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_head_takes_its_factor_of_the_optimizers_own_step(name):
    model, plain = attention(), attention()
    optimizer, other = (
        optimizer_of(name, matrices(m), **OPTIMIZERS[name]) for m in (model, plain)
    )
    weights = {"q": (model.q_proj.weight, 4), "k": (model.k_proj.weight, 2)}

    def norms():
        return {
            side: torch.linalg.matrix_norm(w.detach().unflatten(0, (n, -1)))
            for side, (w, n) in weights.items()
        }

    *warm_up, last = gradients(model, 6)
    for grads in warm_up[:2]:
        step_by(model, optimizer, grads)
        step_by(plain, other, grads)
    start = norms()
    handle = qkeel.apply(model, f"lalr:tau={TAU}", optimizer)
    for grads in warm_up[2:]:
        with torch.no_grad():  # weights that are not the start's times a number
            for w, _ in weights.values():
                w.add_(torch.randn_like(w))
            for p, source in zip(plain.parameters(), model.parameters()):
                p.copy_(source)
        old = values(model)
        factors = qk_factors(start, norms())
        step_by(model, optimizer, grads)
        step_by(plain, other, grads)
        for n, p in plain.named_parameters():
            expected = p.detach()
            if n[0] in factors:
                factor = TAU * factors[n[0]].repeat_interleave(4)[:, None]
                expected = old[n] + factor * (p.detach() - old[n])
            assert_close(
                model.get_parameter(n).detach(), expected, rtol=1e-12, atol=1e-14
            )
    handle.remove()
    step_by(model, optimizer, last)


def factors(model, changes, remedy="lalr:tau=1"):
    """The factor of each row after weights were multiplied, read off one step of plain SGD."""
    optimizer = sgd(model, 0.5)
    with qkeel.apply(model, remedy, optimizer):
        with torch.no_grad():
            for name, factor in changes.items():
                model.get_parameter(name).mul_(factor)
        before = values(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    moved = {n: (before[n] - p.detach()) / 0.5 for n, p in model.named_parameters()}
    return {name: m if m.ndim == 1 else m[:, 0] for name, m in moved.items()}


def latent(rope=1.0, **options):
    """Latent attention; `rope` sizes the rotated key, so that its term binds for W_dq or not."""
    model = mla(**options).double()
    with torch.no_grad():
        model.k_rope.weight.mul_(rope)
    return model


def tied():
    """One weight makes q and k."""
    model = attention(n_kv_heads=4)
    model.k_proj.weight = model.q_proj.weight
    return model


def zero():
    """W_Q starts at 0, as in full µ-parametrisation."""
    model = attention(n_kv_heads=4)
    nn.init.zeros_(model.q_proj.weight)
    return model


def twice():
    """One module that stands in two places is one site."""
    layer = attention(n_kv_heads=4)
    return nn.ModuleList([layer, layer])


Q, K = "q_proj", "k_proj"
# A model, by what its weights are multiplied after the start, τ, and the factors: by hand from algorithms 1 and 2.
CASES = [
    (attention, {}, 0.25, {Q: 0.25, K: 0.25, "v_proj": 1, "o_proj": 1}),
    (lambda: attention(n_kv_heads=4), {Q: 5, K: 3}, 1, {Q: 1 / 3, K: 1 / 5}),
    (tied, {Q: 4}, 1, {Q: 1 / 4}),
    (zero, {}, 0.5, {K: 0.5}),
    (lambda: attention(n_kv_heads=4), {Q: 0}, 0.5, {K: 0.5}),
    (twice, {"0.k_proj": 2}, 1, {"0.q_proj": 0.5}),
    (
        lambda: latent(0.01),
        {"q_up": 2},
        1,
        {"q_up": 1, "k_up": 0.5, "q_down": 0.5, "kv_down": 0.5, "k_rope": 1},
    ),
    (lambda: latent(100.0), {"q_up": 2}, 1, {"q_down": 1, "kv_down": 0.5, "q_rope": 1}),
    (
        latent,
        {"q_down": 2},
        1,
        {"q_up": 0.5, "k_up": 0.5, "q_rope": 0.5, "q_down": 1, "k_rope": 0.5},
    ),
    # A norm on the latents takes the down-projections out.
    (
        lambda: latent(latent_norm=True),
        {"q_down": 7, "kv_down": 3, "q_up": 2},
        0.5,
        {"q_down": 1, "kv_down": 1, "k_up": 0.25, "q_up": 0.5},
    ),
]


@pytest.mark.parametrize(("build", "changes", "tau", "expected"), CASES)
def test_rates_are_those_of_the_published_algorithms(
    build,
    changes,
    tau,
    expected,
):
    changes = {f"{name}.weight": x for name, x in changes.items()}
    rates = factors(build(), changes, f"lalr:tau={tau}")
    for name, factor in expected.items():
        rate = rates[f"{name}.weight"]
        assert_close(rate, torch.full_like(rate, factor), msg=name)


def test_the_term_that_binds_may_change_between_start_and_now():
    model = latent(0.01)  # at the start the plain term binds for W_dq …
    with torch.no_grad():
        nope = max(
            a.norm() * b.norm() * model.kv_down.weight.norm()
            for a, b in zip(model.q_up.weight.chunk(4), model.k_up.weight.chunk(4))
        )
        rope = (
            max(r.norm() for r in model.q_rope.weight.chunk(4))
            * model.k_rope.weight.norm()
        )
    rate = factors(model, {"k_rope.weight": 1e4})["q_down.weight"]  # … later the other
    assert_close(rate, (nope / (rope * 1e4)).expand_as(rate))


def test_biases_keep_the_base_rate_and_so_do_weights_that_were_zero_at_the_start():
    rates = factors(attention(bias=True), {}, "lalr:tau=0.1")
    assert torch.allclose(rates["q_proj.bias"], torch.ones(16).double())
    assert torch.allclose(rates["k_proj.bias"], torch.ones(8).double())
    model = zero()
    optimizer = sgd(model, 0.5)
    with qkeel.apply(model, "lalr:tau=0.5", optimizer):
        nn.init.constant_(model.q_proj.weight, 3.0)  # nothing to be compared with
        keys = model.k_proj.weight.detach() - 0.25
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert_close(model.k_proj.weight.detach(), keys)


def test_the_factors_of_two_remedies_multiply():
    weights = []
    for remedy in (
        "lalr:tau=0.25",
        "lalr:tau=0.5+qk_lr:factor=0.5",
        "qk_lr:factor=0.5+lalr:tau=0.5",
    ):
        model = attention()
        optimizer = adamw(model, 0.1)
        qkeel.apply(model, remedy, optimizer)
        for grads in gradients(model, 5):
            step_by(model, optimizer, grads)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in weights[1:]:
        assert torch.allclose(other, weights[0], rtol=0, atol=1e-14)


def test_the_settings_of_step_remedies_where_nothing_is_said_are_those_of_the_documents():
    settings = {
        name: [getattr(REMEDIES[name](), option) for option in options.split()]
        for name, options in {
            "lalr": "tau",
            "qk_clip": "threshold groups frozen steps",
            "qk_lr": "factor",
            "qk_weight_decay": "decay",
            "spectral_cap": "cap per",
        }.items()
    }
    assert settings == {
        "lalr": [0.1],
        "qk_clip": [100.0, "query", "refuse", "full"],
        "qk_lr": [0.1],
        "qk_weight_decay": [0.1],
        "spectral_cap": [4.0, "head"],
    }
