"""A step of fused Adam in one compiled pass, with a rate per head, is the step that is rescaled afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import nn

import qkeel
from qkeel.kernels.native import operators
from qkeel.remedies.fused_adam import AdamPass, _fits, _fits_state

from .families import FAMILIES, batch
from .models import attention, decoder, gradients, loss, mla, step_by, tokens

STEPS = 50
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "groups": lambda p: torch.optim.AdamW(
        [
            {"params": p[::2], "lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.3},
            {"params": p[1::2], "eps": 1e-3, "weight_decay": 0.0},
        ],
        lr=0.005,
        fused=True,
    ),
}


@pytest.fixture(autouse=True)
def _compiled(_compiler: None) -> None:
    assert operators.adamw_ready()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each step of the pass took."""
    seen: list[int] = []
    theirs = operators.adam_lines
    monkeypatch.setattr(
        operators, "adam_lines", lambda tensors, options: (seen.append(len(tensors.weights)), theirs(tensors, options))
    )
    return seen


def fused(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, fused=True)


def both(
    model: nn.Module, make: Make, remedy: str, monkeypatch: pytest.MonkeyPatch, example: Any = None, steps: int = STEPS
) -> float:
    """The largest difference over weights and state, relative to the largest number of each, native on and off."""
    found = []
    for native in ("1", "0"):
        monkeypatch.setenv("QKEEL_NATIVE", native)
        own = copy.deepcopy(model)
        optimizer = make(list(own.parameters()))
        with qkeel.apply(remedy, own, optimizer, example=example):
            for grads in gradients(own, steps):
                step_by(own, optimizer, grads)
        states = [x for p in own.parameters() for x in optimizer.state[p].values()]
        found.append([*(p.detach() for p in own.parameters()), *states])
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("family", one_in(FAMILIES, 3))
def test_every_layout_of_heads_gives_the_rescaled_steps(
    family: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family].model(torch.float32)
    assert both(model, OPTIMIZERS["adamw"], "lalr:tau=0.3", monkeypatch, example=batch(), steps=12) <= 1e-6
    assert len(taken) == 12


@pytest.mark.parametrize(
    "remedy", ["lalr:tau=0.3", "lalr:tau=0.3,decay=plain", "lalr:norm=spectral", "qk_lr:factor=0.2"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_and_remedy_gives_the_rescaled_steps(
    name: str, remedy: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "adam" and "plain" in remedy:
        pytest.skip("its decay is part of the gradient, which lalr refuses")
    assert both(attention(torch.float32), OPTIMIZERS[name], remedy, monkeypatch) <= 1e-6
    assert sum(taken) == 2 * STEPS


def test_latent_attention_and_gated_units_and_weights_that_layers_share(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shared = decoder(n_layers=2)
    blocks = [m for m in shared.modules() if isinstance(m, qkeel.nn.Attention)]
    blocks[1].q_proj.weight = blocks[0].q_proj.weight
    for model in (mla(), qkeel.nn.GAU(16), shared):
        assert both(model, OPTIMIZERS["adamw"], "lalr:tau=0.5", monkeypatch, steps=20) <= 1e-6
    assert len(taken) == 60


def test_at_factor_1_the_steps_are_those_of_the_optimizer_alone(taken: list[int]) -> None:
    plain, remedied = decoder(), decoder()
    alone, optimizer = fused(plain), fused(remedied)
    qkeel.apply("qk_lr:factor=1", remedied, optimizer)
    for grads in gradients(plain, 5):
        step_by(plain, alone, grads)
        step_by(remedied, optimizer, grads)
    assert len(taken) == 5
    heads = ("q_proj.weight", "k_proj.weight")
    for (name, a), b in zip(plain.named_parameters(), remedied.parameters(), strict=True):
        if name.endswith(heads):  # torch rounds a step otherwise without AVX2
            assert (a - b).abs().max() <= 1e-6 * a.abs().max(), name
        else:
            assert torch.equal(a, b), name


def test_after_the_first_step_only_a_weight_that_others_have_changed_is_summed_anew(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attention(torch.float32)
    optimizer = fused(model)
    qkeel.apply("lalr", model, optimizer)
    grads = list(gradients(model, 4))
    step_by(model, optimizer, grads[0])
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *_, **__: pytest.fail("measured by torch"))
    step_by(model, optimizer, grads[1])
    assert taken == [2, 2]
    with torch.no_grad():
        model.k_proj.weight.mul_(0.5)
    step_by(model, optimizer, grads[2])
    assert taken == [2, 2, 1, 2]
    step_by(model, optimizer, grads[3])
    assert taken == [2, 2, 1, 2, 2]


def test_gradients_groups_and_the_optimizer_are_left_as_they_were(taken: list[int]) -> None:
    model = attention(torch.float32)
    optimizer = fused(model)
    before = set(vars(optimizer))
    qkeel.apply("lalr", model, optimizer)
    grads = next(gradients(model, 1))
    step_by(model, optimizer, grads)
    assert taken == [2]
    assert set(vars(optimizer)) == before
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, grads[name])  # type: ignore[arg-type]
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(optimizer.state[p]["step"]) == 1


def test_after_a_step_that_raised_the_next_one_is_whole(taken: list[int]) -> None:
    model = attention(torch.float32)
    optimizer = fused(model)
    handle = qkeel.apply("lalr", model, optimizer)
    grads = list(gradients(model, 2))
    step_by(model, optimizer, grads[0])
    for name, p in model.named_parameters():
        p.grad = grads[1][name].clone()
    model.v_proj.weight.grad = grads[1]["v_proj.weight"].to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert model.q_proj.weight.grad is not None
    step_by(model, optimizer, grads[1])
    assert taken == [2, 2]
    handle.remove()
    assert "_init_group" not in vars(optimizer)


def test_a_closure_is_called_once_and_its_gradients_are_stepped(taken: list[int]) -> None:
    models = [decoder(), decoder()]
    for model, late in zip(models, (True, False)):
        optimizer = fused(model)
        qkeel.apply("lalr", model, optimizer)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model, tokens())
            found.backward()
            return found

        for _ in range(3):
            if late:
                assert optimizer.step(closure).isfinite()
            else:
                closure()
                optimizer.step()
    assert len(taken) == 6
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_weights_without_a_gradient_and_frozen_ones_stay(taken: list[int]) -> None:
    model = attention(torch.float32)
    model.k_proj.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    qkeel.apply("lalr", model, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    grads = next(gradients(model, 1))
    model.v_proj.weight.grad = grads["v_proj.weight"]
    optimizer.step()
    assert not taken
    model.q_proj.weight.grad = grads["q_proj.weight"]
    optimizer.step()
    assert taken == [1]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"q_proj.weight", "v_proj.weight"}


def test_two_remedies_on_steps_scale_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for native in ("1", "0"):
        monkeypatch.setenv("QKEEL_NATIVE", native)
        model = attention(torch.float32)
        optimizer = fused(model)
        first = qkeel.apply("lalr:tau=0.5", model, optimizer)
        second = qkeel.apply("qk_lr:factor=0.3", model, optimizer)
        for i, grads in enumerate(gradients(model, 12)):
            if i == 8:
                first.remove()
            step_by(model, optimizer, grads)
        second.remove()
        found.append([p.detach() for p in model.parameters()])
    for a, b in zip(*found):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


@pytest.fixture
def _wide_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_wide_default")  # of which nothing that the pass keeps depends
def test_a_checkpoint_goes_on_in_the_pass_or_without_it(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    grads = list(gradients(attention(torch.float32), 10))
    found = []
    for later in ("1", "0"):
        monkeypatch.setenv("QKEEL_NATIVE", "1")
        model = attention(torch.float32)
        optimizer = fused(model)
        handle = qkeel.apply("lalr", model, optimizer)
        for g in grads[:5]:
            step_by(model, optimizer, g)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state()))
        model, monkeypatch_to = attention(torch.float32), later
        optimizer = fused(model)
        handle = qkeel.apply("lalr", model, optimizer)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        handle.load(kept[2])
        monkeypatch.setenv("QKEEL_NATIVE", monkeypatch_to)
        for g in grads[5:]:
            step_by(model, optimizer, g)
        found.append([p.detach() for p in model.parameters()])
    assert len(taken) == 15 + 2  # steps, and weights whose squares are summed after loading
    for a, b in zip(*found):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    model = attention(torch.float32)
    optimizer = fused(model)
    qkeel.apply("lalr", model, optimizer)
    for g in grads:  # without an interruption: the same bits
        step_by(model, optimizer, g)
    assert all(map(torch.equal, model.parameters(), found[0]))


def test_a_gradient_that_lies_otherwise_and_a_weight_that_lies_crosswise(taken: list[int]) -> None:
    plain, crosswise = attention(torch.float32), attention(torch.float32)
    with torch.no_grad():
        crosswise.q_proj.weight = nn.Parameter(crosswise.q_proj.weight.T.contiguous().T)
    grads = list(gradients(plain, 6))
    for model in (plain, crosswise):
        optimizer = fused(model)
        qkeel.apply("lalr", model, optimizer)
        for g in grads:
            for name, p in model.named_parameters():
                p.grad = g[name].T.contiguous().T
            optimizer.step()
    assert taken == [2] * 12
    for a, b in zip(plain.parameters(), crosswise.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


class Own(torch.optim.AdamW):
    """A step that its author may have changed."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: Own(p, fused=True),
    ],
)
def test_other_optimizers_step_as_before(make: Make, taken: list[int]) -> None:
    model = attention(torch.float32)
    optimizer = make(list(model.parameters()))
    qkeel.apply("lalr", model, optimizer)
    step_by(model, optimizer, next(gradients(model, 1)))
    assert not taken


def test_other_weights_states_and_skipped_steps_are_left_to_torch(
    taken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = attention(torch.float64)
    optimizer: Any = fused(model)
    qkeel.apply("lalr", model, optimizer)
    with caplog.at_level("DEBUG", "qkeel"):
        step_by(model.float(), optimizer, next(gradients(model, 1)))
    assert "copied and rescaled: the weights had a different dtype" in caplog.text
    for model in (attention(torch.float64), attention(torch.float32)):
        optimizer = fused(model)
        qkeel.apply("lalr", model, optimizer)
        grads = list(gradients(model, 3))
        if model.q_proj.weight.dtype == torch.float32:
            optimizer.found_inf = torch.ones(())
            before = model.q_proj.weight.detach().clone()
            step_by(model, optimizer, grads[0])
            assert torch.equal(model.q_proj.weight, before)
            del optimizer.found_inf
            state = optimizer.state[model.q_proj.weight]
            state["exp_avg"] = state["exp_avg"].T.contiguous().T
        step_by(model, optimizer, grads[1])
        assert not taken
    state["exp_avg"] = state["exp_avg"].contiguous()
    step_by(model, optimizer, grads[2])
    assert taken == [1, 1, 2]  # the squares that torch's steps left, weight by weight, then the step


def test_a_torch_whose_step_asks_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    monkeypatch.setattr("qkeel.patching.optimizers._ARGUMENTS", ("self", "group"))
    model = attention(torch.float32)
    optimizer = fused(model)
    assert AdamPass.of(optimizer, [], [], plain=False) is None
    qkeel.apply("lalr", model, optimizer)
    step_by(model, optimizer, next(gradients(model, 1)))
    assert not taken


def test_a_step_that_a_scaler_has_a_hand_in_is_left_to_torch(taken: list[int]) -> None:
    model = attention(torch.float32)
    optimizer: Any = fused(model)
    qkeel.apply("lalr", model, optimizer)
    for i, grads in enumerate(gradients(model, 3)):
        if i == 1:
            optimizer.grad_scale = torch.ones(())
        if i == 2:
            del optimizer.grad_scale
        step_by(model, optimizer, grads)
        assert taken == [[2], [2], [2, 1, 1, 2]][i]  # weight by weight the squares that torch's step left


def test_which_weights_and_states_the_pass_is_written_for() -> None:
    weight = torch.randn(4, 6)
    for x, fits in (
        (weight, True),
        (weight.T, True),
        (weight[0], True),
        (weight[:, :3], False),
        (weight[::2], False),
        (weight.double(), False),
        (weight.half(), False),
        (weight.to("meta"), False),
        (torch.tensor(1.0), False),
        (weight[None], False),
        (weight.to_sparse(), False),
    ):
        assert _fits(x, weight.device) is fits, (x.shape, x.stride() if x.layout == torch.strided else x.layout)
    with torch.inference_mode():
        assert not _fits(torch.ones(2), weight.device)
    for name, state, fits in (
        ("exp_avg", torch.zeros(4, 6), True),
        ("exp_avg", torch.zeros(6, 4).T, False),
        ("exp_avg", torch.zeros(4, 5), False),
        ("exp_avg", torch.zeros(4, 6).double(), False),
        ("exp_avg", torch.zeros(4, 6, device="meta"), False),
        ("exp_avg", torch.zeros(()), False),
        ("exp_avg", 0.0, False),
        ("step", torch.zeros(()), True),
        ("step", torch.zeros(1), False),
        ("step", torch.zeros((), dtype=torch.float64), False),
        ("step", 3, False),
    ):
        assert _fits_state(name, state, weight) is fits, (name, state)
