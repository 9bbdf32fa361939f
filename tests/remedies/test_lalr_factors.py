"""The factors of lalr: golden O17, grouped keys (9.4), latent attention, zero and shared weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.errors import RefusedError
from qkeel.nn import Attention

from .models import attention, mla

LR = 0.5


def factors(
    model: nn.Module, changes: dict[str, float], remedy: str = "lalr:tau=1"
) -> dict[str, Tensor]:
    """Learning-rate factors per output row after weights were multiplied, read off one step of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with qkeel.apply(model, remedy, optimizer):
        with torch.no_grad():
            for name, factor in changes.items():
                model.get_parameter(name).mul_(factor)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    moved = {
        name: (before[name] - p.detach()) / LR for name, p in model.named_parameters()
    }
    return {name: m if m.ndim == 1 else m[:, 0] for name, m in moved.items()}


def test_golden_o17_heads() -> None:
    found = factors(attention(n_kv_heads=4), {"q_proj.weight": 5, "k_proj.weight": 3})
    assert torch.allclose(
        found["q_proj.weight"], torch.tensor(1 / 3, dtype=torch.float64)
    )
    assert torch.allclose(
        found["k_proj.weight"], torch.tensor(1 / 5, dtype=torch.float64)
    )
    assert torch.allclose(found["v_proj.weight"], torch.ones((), dtype=torch.float64))


def test_at_the_start_every_rate_is_tau() -> None:
    for model in (attention(), mla().double()):
        found = factors(model, {}, "lalr:tau=0.25")
        for name, own in found.items():
            expected = 1.0 if name.startswith(("v_", "o_")) else 0.25
            assert torch.allclose(own, torch.tensor(expected, dtype=own.dtype)), name


@pytest.mark.parametrize("nope_binds", [True, False])
def test_golden_o17_latent_attention_all_w_uq_doubled(nope_binds: bool) -> None:
    model = mla().double()
    # What binds for W_dq is the larger product of the two terms, now and at the start.
    with torch.no_grad():
        model.k_rope.weight.mul_(0.01 if nope_binds else 100.0)
    found = factors(model, {"q_up.weight": 2})
    expected = {
        "q_up": 1,
        "k_up": 0.5,
        "q_rope": 1,
        "q_down": 0.5 if nope_binds else 1,
        "kv_down": 0.5,
        "k_rope": 1,
    }
    for name, value in expected.items():
        assert torch.allclose(
            found[f"{name}.weight"], torch.tensor(value, dtype=torch.float64)
        ), name


def test_golden_o17_latent_attention_w_dq_doubled() -> None:
    found = factors(mla().double(), {"q_down.weight": 2})
    for name, value in {
        "q_up": 0.5,
        "k_up": 0.5,
        "q_rope": 0.5,
        "q_down": 1,
        "kv_down": 0.5,
        "k_rope": 0.5,
    }.items():
        assert torch.allclose(
            found[f"{name}.weight"], torch.tensor(value, dtype=torch.float64)
        ), name


def test_the_binding_term_of_w_dq_may_change_between_start_and_now() -> None:
    model = mla().double()
    with torch.no_grad():
        model.k_rope.weight.mul_(0.01)  # at the start the plain term binds …
    nope = max(
        a.norm() * b.norm() * model.kv_down.weight.norm()
        for a, b in zip(model.q_up.weight.chunk(4), model.k_up.weight.chunk(4))
    )
    rope = (
        max(r.norm() for r in model.q_rope.weight.chunk(4)) * model.k_rope.weight.norm()
    )
    expected = float((nope / (rope * 1e4)).detach())
    found = factors(model, {"k_rope.weight": 1e4})  # … later the rotated one
    assert torch.allclose(
        found["q_down.weight"], torch.tensor(expected, dtype=torch.float64)
    )


def test_a_norm_on_the_latents_takes_the_down_projections_out() -> None:
    model = mla(latent_norm=True).double()
    found = factors(
        model,
        {"q_down.weight": 7, "kv_down.weight": 3, "q_up.weight": 2},
        "lalr:tau=0.5",
    )
    assert torch.allclose(found["q_down.weight"], torch.ones(12, dtype=torch.float64))
    assert torch.allclose(found["kv_down.weight"], torch.ones(10, dtype=torch.float64))
    assert torch.allclose(
        found["k_up.weight"], torch.full((24,), 0.25, dtype=torch.float64)
    )
    assert torch.allclose(
        found["q_up.weight"], torch.full((24,), 0.5, dtype=torch.float64)
    )


def test_grouped_keys_follow_the_largest_query_head_of_their_group() -> None:
    model = attention(n_kv_heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    q = model.q_proj.weight
    start = [w.norm().item() for w in q.detach().chunk(4)]
    with qkeel.apply(model, "lalr:tau=1", optimizer):
        with torch.no_grad():
            q[4:8].mul_(6)  # query head 1, of key head 0
            model.k_proj.weight[4:].mul_(3)  # key head 1, of query heads 2 and 3
        before_q, before_k = q.detach().clone(), model.k_proj.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    k = ((before_k - model.k_proj.weight) / LR)[:, 0]
    assert k[0].item() == pytest.approx(max(start[:2]) / max(start[0], 6 * start[1]))
    assert k[4].item() == pytest.approx(1)
    rates = ((before_q - q) / LR)[::4, 0].tolist()
    assert rates == pytest.approx([1, 1, 1 / 3, 1 / 3])


def test_biases_keep_the_base_rate() -> None:
    found = factors(attention(bias=True), {}, "lalr:tau=0.1")
    assert torch.allclose(found["q_proj.bias"], torch.ones(16, dtype=torch.float64))
    assert torch.allclose(found["k_proj.bias"], torch.ones(8, dtype=torch.float64))


def test_a_weight_of_zero_never_gives_infinite_or_nan_rates() -> None:
    at_start = attention(n_kv_heads=4)
    nn.init.zeros_(at_start.q_proj.weight)  # full µ-parametrisation starts W_Q at 0
    found = factors(at_start, {}, "lalr:tau=0.5")
    assert torch.allclose(
        found["k_proj.weight"], torch.full((16,), 0.5, dtype=torch.float64)
    )
    later = factors(attention(n_kv_heads=4), {"q_proj.weight": 0}, "lalr:tau=0.5")
    assert torch.allclose(
        later["k_proj.weight"], torch.full((16,), 0.5, dtype=torch.float64)
    )
    # What was zero at the start has nothing to be compared with, however large it is now.
    model = attention(n_kv_heads=4)
    nn.init.zeros_(model.q_proj.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with qkeel.apply(model, "lalr:tau=0.5", optimizer):
        nn.init.constant_(model.q_proj.weight, 3.0)
        keys = model.k_proj.weight.detach() - LR * 0.5
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(model.k_proj.weight.detach(), keys)


def test_layers_that_share_a_weight_scale_its_step_once_by_all_the_logits_it_makes() -> (
    None
):
    a, b = attention(n_kv_heads=4), attention(n_kv_heads=4)
    b.q_proj.weight = a.q_proj.weight
    with torch.no_grad():
        b.k_proj.weight.mul_(5)
    model = nn.ModuleList([a, b])
    k = torch.stack([w.norm() for w in b.k_proj.weight.detach().chunk(4)])
    found = factors(model, {"0.k_proj.weight": 50, "1.k_proj.weight": 2})
    # the largest partner at the start is layer 1's, now layer 0's
    assert torch.allclose(found["0.q_proj.weight"][::4], k / (k / 5 * 50))
    assert torch.allclose(found["1.k_proj.weight"], torch.ones(16, dtype=torch.float64))


def test_a_weight_that_makes_q_and_k_is_its_own_partner() -> None:
    model = attention(n_kv_heads=4)
    model.k_proj.weight = model.q_proj.weight
    found = factors(model, {"q_proj.weight": 4})
    assert torch.allclose(
        found["q_proj.weight"], torch.full((16,), 0.25, dtype=torch.float64)
    )


def test_one_module_used_twice_is_one_site() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = attention(n_kv_heads=4)
            self.again = self.first

    found = factors(Looped(), {"first.k_proj.weight": 2})
    assert torch.allclose(
        found["first.q_proj.weight"], torch.full((16,), 0.5, dtype=torch.float64)
    )


def test_normed_queries_and_keys_are_refused_with_the_reason() -> None:
    model = Attention(16, 4, spec=qkeel.preset("qwen3"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        RefusedError,
        match="independent of the size of the weights; use one of the two, or qk_lr",
    ):
        qkeel.apply(model, "lalr", optimizer)
