"""qk_clip:steps=matched: clipped weights are c times weights that are never clipped, by an independent definition."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import qkeel
from qkeel.errors import InvalidValueError, RefusedError
from qkeel.remedies.apply import active_remedies
from qkeel.remedies.head_weights import slice_name

from .models import D_MODEL, attention, mla, trained

HEADS, THRESHOLD, RATE = 4, 1.0, 3e-3


def signs(gradient: Tensor) -> Tensor:
    """The signs, and 0 where a gradient is rounding alone, as that of a bias of keys is."""
    return gradient.sign() * (gradient.abs() > 1e-12)


class Sign(Optimizer):
    """Steps that do not depend on the size of the gradient, for which matched steps are exact."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * signs(p.grad))


def batches(n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 7, D_MODEL, generator=generator, dtype=torch.float64)
        for _ in range(n)
    ]


def torch_attention(seed: int) -> nn.MultiheadAttention:
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(
        D_MODEL, HEADS, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        assert module.in_proj_bias is not None
        module.in_proj_bias.normal_(std=0.3)
        module.in_proj_weight[:D_MODEL].mul_(
            torch.tensor([6.0, 1.0, 3.0, 0.5]).repeat_interleave(D_MODEL // HEADS)[
                :, None
            ]
        )
    return module


def test_clipped_weights_are_c_times_weights_that_take_full_steps_and_are_never_clipped() -> (
    None
):
    seed = int(torch.randint(1000, (1,)))
    module = torch_attention(seed)
    free = {
        name: p.detach().clone().requires_grad_()
        for name, p in module.named_parameters()
    }
    c = torch.ones(HEADS, dtype=torch.float64)  # by head; the same for q and k
    optimizer = Sign(module.parameters(), RATE)
    handle = qkeel.apply(
        module,
        f"qk_clip:threshold={THRESHOLD},steps=matched",
        optimizer,
        batch=(batches(1, seed)[0],) * 3,
    )
    d = D_MODEL // HEADS
    for x in batches(12, seed + 1):
        target = x.roll(1, 1)
        loss = (module(x, x, x, need_weights=False)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        # The reference: c multiplies what free weights make, and the free weights take full steps.
        rows = torch.cat(
            [c.repeat_interleave(d).repeat(2), torch.ones(D_MODEL, dtype=torch.float64)]
        )
        made = F.linear(
            x, free["in_proj_weight"] * rows[:, None], free["in_proj_bias"] * rows
        )
        q, k, v = (
            part.unflatten(-1, (HEADS, d)).transpose(1, 2) for part in made.chunk(3, -1)
        )
        logits = q @ k.mT / math.sqrt(d)
        out = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
        loss = (
            (F.linear(out, free["out_proj.weight"], free["out_proj.bias"]) - target)
            .square()
            .mean()
        )
        grads = torch.autograd.grad(loss, list(free.values()))
        with torch.no_grad():
            for p, g in zip(free.values(), grads):
                p.sub_(RATE * signs(g))
        c = c * (THRESHOLD / logits.detach().amax((0, 2, 3))).clamp(max=1).sqrt()
        rows = torch.cat(
            [c.repeat_interleave(d).repeat(2), torch.ones(D_MODEL, dtype=torch.float64)]
        )
        assert torch.allclose(
            module.in_proj_weight,
            free["in_proj_weight"] * rows[:, None],
            rtol=1e-9,
            atol=1e-12,
        )
        assert module.in_proj_bias is not None
        assert torch.allclose(
            module.in_proj_bias, free["in_proj_bias"] * rows, rtol=1e-9, atol=1e-12
        )
    assert float(c.max()) < 0.999
    assert float(c.min()) > 0.01
    state = handle.state()
    found = torch.stack([v for name, v in state.items() if ".steps." in name])
    assert torch.allclose(found.double(), c.expand_as(found), rtol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_step_after_a_clip_is_shortened_by_the_factor_of_the_clip(
    kv_heads: int,
) -> None:
    model = attention(torch.float64, kv_heads, bias=True)
    with torch.no_grad():
        model.q_proj.weight.mul_(20)
    optimizer = Sign(model.parameters(), 0.0)
    handle = qkeel.apply(model, "qk_clip:threshold=1,steps=matched", optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = batches(1, 0)[0]
    model(x).square().sum().backward()
    optimizer.step()
    once = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.param_groups[0]["lr"] = 1e-9  # a step that leaves every logit where it is
    optimizer.step()  # without a pass, so nothing is clipped
    for name, p in model.named_parameters():
        ratio = (once[name] / before[name]).nan_to_num(1.0)
        assert p.grad is not None
        ok = signs(p.grad) != 0
        moved = (p.detach() - once[name]) / (-1e-9 * p.grad.sign())
        assert torch.allclose(moved[ok], ratio[ok], rtol=1e-4), name
    if kv_heads < HEADS:
        assert torch.equal(once["k_proj.weight"], before["k_proj.weight"])
    assert not torch.equal(once["q_proj.weight"], before["q_proj.weight"])
    handle.remove()


def clipped(
    steps: int,
    *,
    fused: bool = True,
    seed: int = 0,
    load: dict[str, Tensor] | None = None,
) -> tuple[nn.Module, qkeel.Handle]:
    torch.manual_seed(seed)
    model = attention(torch.float32, 2, bias=True)
    with torch.no_grad():
        model.q_proj.weight.mul_(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    handle = qkeel.apply(model, "qk_clip:threshold=1,steps=matched", optimizer)
    if load is not None:
        handle.load(load)
    for x in batches(steps, seed):
        model(x.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


def test_the_products_of_the_factors_are_saved_and_restored() -> None:
    _, handle = clipped(4)
    state = {name: value.clone() for name, value in handle.state().items()}
    size = D_MODEL // 4
    query, key = (
        f"0.steps.q_proj.weight:0/4x{size}",
        f"0.steps.k_proj.weight:0/2x{size}",
    )
    assert set(state) == {query, key, f"0.steps.q_proj.bias:0/4x{size}"}
    assert float(state[query].max()) < 0.9
    assert torch.equal(state[key], torch.ones(2))  # shared keys are never scaled
    _, again = clipped(0, load=state)
    assert all(torch.equal(value, state[name]) for name, value in again.state().items())
    continued = clipped(3, load=state)[1].state()
    assert (continued[query] <= state[query]).all()
    with pytest.raises(
        InvalidValueError,
        match=r"factors of 4 heads for the steps of q_proj.weight:0/.*, got \(3,\)",
    ):
        again.load({**state, query: torch.ones(3)})
    with pytest.raises(
        InvalidValueError,
        match=r"factors of 4 heads for the steps of q_proj.weight:0/.*, got none",
    ):
        again.load({})  # full steps on clipped weights would be silent


def test_a_logit_that_is_a_sum_shortens_the_steps_of_each_weight_by_its_own_factor() -> (
    None
):
    model = mla().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with qkeel.apply(
        model, "qk_clip:threshold=1e-3,steps=matched", optimizer
    ) as handle:
        trained(model(batches(1, 3)[0]))
        optimizer.step()
        state = {
            name.partition("steps.")[2]: value for name, value in handle.state().items()
        }
    (site,) = qkeel.find_sites(model, batches(1, 3)[0])
    slices = {slice_name(s): s for term in site.terms for s in (*term.query, *term.key)}
    assert state.keys() >= slices.keys()
    for name, s in slices.items():
        ratio = s.heads(model.get_parameter(s.parameter)) / s.heads(before[s.parameter])
        assert torch.allclose(
            ratio.flatten(1).mean(1), state[name].to(ratio), rtol=1e-6
        ), name
    assert any(float(v.min()) < 1 for v in state.values())


@pytest.mark.parametrize(
    "order", [("lalr", "qk_clip:steps=matched"), ("qk_clip:steps=matched", "lalr")]
)
def test_lalr_undoes_matched_steps_and_the_pair_is_refused_in_either_order(
    order: tuple[str, str],
) -> None:
    model = attention(torch.float32, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RefusedError, match="undoes matched steps"):
        qkeel.apply(model, "+".join(order), optimizer)
    with (
        qkeel.apply(model, order[0], optimizer),
        pytest.raises(RefusedError, match="undoes matched steps"),
    ):
        qkeel.apply(model, order[1], optimizer)
    qkeel.apply(model, "lalr+qk_clip", optimizer).remove()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate makes it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


@pytest.mark.parametrize("spec", ["lalr", "qk_clip", "qk_lr", "qk_clip:steps=matched"])
def test_a_remedy_on_steps_ends_with_its_optimizer(spec: str) -> None:
    model = attention(torch.float64, HEADS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qkeel.apply(model, spec, optimizer)
    del optimizer
    qkeel.apply(model, spec, torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    assert not active_remedies(model)
    # Of each, one pair of hooks counts the passes without a step; what reads logits is gone.
    assert sum(len(module._forward_hooks) for module in model.modules()) == 2


def test_a_remedy_on_steps_does_not_end_with_a_wrapper_of_its_optimizer() -> None:
    model = attention(torch.float64, HEADS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = qkeel.apply(model, "lalr", Wrapper(optimizer))
    gc.collect()
    assert active_remedies(model) == {"lalr"}
    handle.remove()
    assert not optimizer._optimizer_step_post_hooks


class Tied(torch.nn.Module):
    """Two layers that share a weight and have biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            attention(torch.float64, HEADS, bias=True),
            attention(torch.float64, HEADS, bias=True),
        )
        self.b.q_proj.weight = self.a.q_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(30 * x)


def test_layers_that_share_a_weight_shorten_the_steps_of_what_they_own() -> None:
    model, x = Tied(), batches(1, 1)[0]
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.q_proj.bias.normal_()
            layer.k_proj.bias.normal_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.apply(
        model, "qk_clip:threshold=0.05,steps=matched", optimizer
    ) as handle:
        trained(model(x))
        optimizer.step()
        state = handle.state()
    size = f"{HEADS}x{D_MODEL // HEADS}"
    for name in (
        "a.q_proj.weight",
        "a.k_proj.weight",
        "a.k_proj.bias",
        "b.k_proj.weight",
        "b.k_proj.bias",
    ):
        ratio = (
            (model.get_parameter(name) / before[name])
            .unflatten(0, (HEADS, -1))
            .flatten(1)
        )
        assert torch.allclose(
            ratio.mean(1), state[f"0.steps.{name}:0/{size}"].double(), rtol=1e-5
        ), name
    assert (
        state[f"0.steps.a.q_proj.weight:0/{size}"] == 1
    ).all()  # the other layer uses it too, so the keys take all
    assert not torch.allclose(
        state[f"0.steps.a.k_proj.bias:0/{size}"],
        state[f"0.steps.b.k_proj.bias:0/{size}"],
    )
