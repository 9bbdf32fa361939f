"""lalr, qk_clip and qk_norm on latent attention with every option of the module."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import qkeel
from qkeel.errors import RefusedError
from qkeel.nn import MLA, LatentSizes
from qkeel.sites import Tap
from qkeel.spec import AttentionSpec, RMSNorm

D, H, LR = 16, 4, 0.01
SIZES = LatentSizes(q_latent=12, kv_latent=10, rope_dim=4, nope_dim=6, value_dim=6)


def mla(
    q_latent: int | None = 12,
    *,
    latent_norm: bool = False,
    spec: AttentionSpec | None = None,
) -> MLA:
    sizes = dataclasses.replace(SIZES, q_latent=q_latent)
    model = MLA(D, H, sizes=sizes, latent_norm=latent_norm, spec=spec).double()
    with torch.no_grad():
        for name in ("q_up", "q_rope", "k_up"):  # heads of unlike norms
            weight = model.get_submodule(name).weight
            weight.view(H, -1).mul_(
                torch.linspace(0.5, 2.0, H, dtype=torch.float64)[:, None]
            )
    return model


def norms(model: MLA) -> dict[str, Tensor]:
    """‖·‖ per head, [1] for what heads share; 1 for what does not scale the logit."""
    heads = {"q_up": H, "q_rope": H, "k_up": H, "k_rope": 1, "kv_down": 1}
    heads |= {"q_down": 1} if model.sizes.q_latent else {}
    found = {
        n: model.get_submodule(n).weight.detach().view(h, -1).norm(dim=1)
        for n, h in heads.items()
    }
    one = torch.ones(1, dtype=torch.float64)
    cut = ("q_down", "kv_down") if model.latent_norm else ()
    return {
        **found,
        **dict.fromkeys(cut, one),
        **({} if model.sizes.q_latent else {"q_down": one}),
    }


def algorithm_2(n: dict[str, Tensor], latent_norm: bool) -> dict[str, Tensor]:
    """Factors of algorithm 2, |dq| = 1 where there is no query latent."""
    uq, qr, uk, kr, dq, dkv = (
        n[w] for w in ("q_up", "q_rope", "k_up", "k_rope", "q_down", "kv_down")
    )
    found = {
        "q_up": 1 / (dq * uk * dkv),
        "k_up": 1 / (uq * dq * dkv),
        "q_rope": 1 / (dq * kr).expand(H),
    }
    found["k_rope"] = 1 / (qr * dq).amax(0, keepdim=True)
    if not latent_norm:
        found["kv_down"] = 1 / (uq * dq * uk).amax(0, keepdim=True)
    return found


@pytest.mark.parametrize("latent_norm", [False, True])
def test_lalr_without_a_query_latent_is_algorithm_2_without_that_matrix(
    latent_norm: bool,
) -> None:
    model = mla(None, latent_norm=latent_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    start = algorithm_2(norms(model), latent_norm)
    with qkeel.apply(model, "lalr", optimizer, tau=0.5):
        with torch.no_grad():
            for name, factor in {
                "q_up": 3.0,
                "k_up": 2.0,
                "q_rope": 5.0,
                "k_rope": 0.5,
                "kv_down": 1.5,
            }.items():
                model.get_submodule(name).weight.mul_(factor)
        now = algorithm_2(norms(model), latent_norm)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for name, p in model.named_parameters():
        part = name.removesuffix(".weight")
        rate = (
            (0.5 * now[part] / start[part])
            if part in start
            else torch.ones(1, dtype=torch.float64)
        )
        moved = ((before[name] - p.detach()) / LR).view(len(rate), -1)
        assert torch.allclose(moved, rate[:, None].expand_as(moved), rtol=1e-12), name


@pytest.mark.parametrize("latent_norm", [False, True])
@torch.no_grad()
def test_qk_clip_without_a_query_latent_brings_the_worst_heads_to_the_threshold(
    latent_norm: bool,
) -> None:
    model, x = (
        mla(None, latent_norm=latent_norm),
        5 * torch.randn(2, 9, D, dtype=torch.float64),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    top = maxima(model, x)
    threshold = float(top.sort().values[1:3].mean())
    before = {name: p.clone() for name, p in model.named_parameters()}
    with qkeel.apply(model, "qk_clip", optimizer, threshold=threshold):
        model.train()
        with torch.enable_grad():
            model(x).sum().backward()
        optimizer.step()
    assert torch.allclose(maxima(model, x), top.clamp(max=threshold), rtol=1e-9)
    gamma = (threshold / top).clamp(max=1)
    for name, power in {
        "q_up": 0.5,
        "k_up": 0.5,
        "q_rope": 1.0,
        "k_rope": 0.0,
        "kv_down": 0.0,
        "v_up": 0.0,
    }.items():
        weight, old = model.get_submodule(name).weight, before[f"{name}.weight"]
        factor = (
            gamma.pow(power).repeat_interleave(len(old) // H)[:, None] if power else 1.0
        )
        assert torch.allclose(weight, old * factor, rtol=1e-12), name
    model.eval()
    cache = model.new_cache()
    steps = torch.cat([model(x[:, i : i + 1], cache=cache) for i in range(9)], dim=1)
    assert torch.allclose(steps, model(x), rtol=0, atol=1e-12)


def maxima(model: MLA, x: Tensor) -> Tensor:
    with torch.no_grad(), Tap(model) as tap:
        model(x)
        return tap.read()[""].max_logit.double()


@pytest.mark.parametrize("remedy", ["lalr", "qk_clip"])
@pytest.mark.parametrize("q_latent", [12, None])
def test_under_a_norm_on_keys_step_remedies_are_refused_and_change_nothing(
    remedy: str, q_latent: int | None
) -> None:
    model = mla(q_latent, spec=AttentionSpec(norm=RMSNorm(gain="dim")))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(RefusedError, match="norm"):
        qkeel.apply(model, remedy, optimizer)
    plain = mla(q_latent)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    with (
        qkeel.apply(plain, "qk_norm", optimizer),
        pytest.raises(RefusedError, match="norm"),
    ):
        qkeel.apply(plain, remedy, optimizer)
    assert not optimizer._optimizer_step_post_hooks


def test_qk_norm_bounds_the_logits_it_decodes_with() -> None:
    model, x = mla(), 1e3 * torch.randn(2, 9, D, dtype=torch.float64)
    assert maxima(model, x).max() > 1e3
    with qkeel.apply(model, "qk_norm"):
        cache = model.new_cache()
        with torch.no_grad(), Tap(model) as tap:
            model(x[:, :8], cache=cache)
            model(x[:, 8:], cache=cache)
            assert tap.read()[""].max_abs_logit.max() <= 10**0.5 * (1 + 1e-6)
