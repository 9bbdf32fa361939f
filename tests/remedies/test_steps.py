"""The mechanism of per-head steps: identity, memory, host reads, exceptions, scalers, resume, other hooks."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel
from qkeel.errors import InvalidValueError, QkeelWarning, RefusedError
from qkeel.remedies import REMEDIES, head_rows
from qkeel.remedies.head_rows import factor_per_row
from qkeel.sites import HeadSlice

from .families import FAMILIES, batch, run
from .models import D_MODEL, attention, gradients, step_by


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_one_leaves_the_new_weights_bit_for_bit(
    size: float, dtype: torch.dtype
) -> None:
    plain, scaled = attention(dtype), attention(dtype)
    a = torch.optim.SGD(plain.parameters(), lr=size)
    b = torch.optim.SGD(scaled.parameters(), lr=size)
    qkeel.apply(scaled, "qk_lr:factor=1", b)
    for grads in gradients(plain, 5):
        step_by(plain, a, grads)
        step_by(scaled, b, grads)
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), scaled.parameters())
    )


@pytest.mark.parametrize("factor", [0, 0.25, 2])
def test_qk_lr_is_a_factor_on_the_rate_of_queries_and_keys_only(factor: float) -> None:
    model, reference = attention(bias=True), attention(bias=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    qk = [reference.q_proj.weight, reference.k_proj.weight]
    rest = [p for p in reference.parameters() if all(p is not w for w in qk)]
    groups = [{"params": qk, "lr": 0.01 * factor}, {"params": rest}]
    other = torch.optim.AdamW(groups, lr=0.01)
    with qkeel.apply(model, "qk_lr", optimizer, factor=factor):
        for grads in gradients(model, 20):
            step_by(model, optimizer, grads)
            step_by(reference, other, grads)
    for name, p in reference.named_parameters():
        assert (model.get_parameter(name) - p).abs().max() < 1e-13, name


@pytest.mark.parametrize("stays", [False, True])
def test_parameters_keep_their_storage_and_the_copy_lives_only_inside_the_step_or_is_made_once(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_rows, "keeps_memory", lambda rows: stays)
    model = attention(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qkeel.apply(model, "lalr", optimizer)
    step_by_no_clone(model, optimizer)
    places = [p.data_ptr() for p in model.parameters()]
    copies: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty_like.default:
                copies.append(weakref.ref(out))
            return out

    with Watch():
        step_by_no_clone(model, optimizer)
    gc.collect()
    assert len(copies) == (0 if stays else 2)  # one of W_q, one of W_k
    assert all(ref() is None for ref in copies)
    assert places == [p.data_ptr() for p in model.parameters()]


def step_by_no_clone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_an_exception_inside_the_step_leaves_nothing_behind() -> None:
    class Breaks(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                self.param_groups[0]["params"][0].data.add_(1)
                raise RuntimeError("disk full")
            return super().step(closure)

    model, reference = attention(), attention()
    optimizer = Breaks(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    qkeel.apply(model, "lalr", optimizer)
    qkeel.apply(reference, "lalr", other)
    grads = list(gradients(model, 2))
    step_by(model, optimizer, grads[0])
    step_by(reference, other, grads[0])
    kept = [p.detach().clone() for p in model.parameters()]
    optimizer.broken = True
    with pytest.raises(RuntimeError, match="disk full"):
        optimizer.step()
    optimizer.broken = False
    with torch.no_grad():
        for p, old in zip(model.parameters(), kept):
            p.copy_(old)
    step_by(model, optimizer, grads[1])
    step_by(reference, other, grads[1])
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters())
    )


def test_a_subclass_whose_step_calls_its_parents_is_scaled_once() -> None:
    # Both run the hooks of the optimizer.
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    a, b = attention(), attention()
    torch.optim.SGD(a.parameters(), lr=0.1)
    one, two = torch.optim.SGD(a.parameters(), lr=0.1), Outer(b.parameters(), lr=0.1)
    qkeel.apply(a, "lalr", one)
    qkeel.apply(b, "lalr", two)
    for grads in gradients(a, 3):
        step_by(a, one, grads)
        step_by(b, two, grads)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_other_post_hooks_see_the_scaled_weights() -> None:
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[Tensor] = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(model.q_proj.weight.detach().clone())
    )  # an average, say
    qkeel.apply(model, "qk_lr:factor=0.5", optimizer)
    step_by(model, optimizer, next(gradients(model, 1)))
    assert torch.equal(seen[0], model.q_proj.weight)


def test_the_factors_of_two_remedies_multiply() -> None:
    found = []
    for remedy in (
        "lalr:tau=0.5+qk_lr:factor=0.5",
        "qk_lr:factor=0.5+lalr:tau=0.5",
        "lalr:tau=0.25",
    ):
        model = attention()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        qkeel.apply(model, remedy, optimizer)
        for grads in gradients(model, 5):
            step_by(model, optimizer, grads)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-14)
    assert torch.allclose(found[1], found[2], rtol=0, atol=1e-14)


def test_the_state_is_named_by_weights_and_another_models_is_refused() -> None:
    model = attention(torch.float32)
    handle = qkeel.apply(
        model, "softcap+lalr", torch.optim.SGD(model.parameters(), lr=0.1)
    )
    state = handle.state()
    query, key = (
        f"1.{name}_proj.weight:0/{n}x{D_MODEL // 4}" for name, n in (("q", 4), ("k", 2))
    )
    assert {k: tuple(v.shape) for k, v in state.items()} == {query: (4,), key: (2,)}
    with pytest.raises(
        InvalidValueError, match="load the state of the same model and remedy"
    ):
        handle.load({query: state[query]})
    with pytest.raises(
        InvalidValueError, match=r"have a different shape: ..k_proj.weight"
    ):
        handle.load({**state, key: torch.ones(3)})


def test_the_norms_of_a_fused_projection_are_saved_by_their_first_rows_and_states_of_0_1_load() -> (
    None
):
    model, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    handle = qkeel.apply(
        model, "lalr", torch.optim.SGD(model.parameters(), lr=0.1), batch=(x, x, x)
    )
    queries, keys = (f"0.in_proj_weight:{row}/4x4" for row in (0, 16))
    assert handle.state().keys() == {queries, keys}
    handle.load(
        {
            "0.in_proj_weight#0": torch.full((4,), 2.0),
            "0.in_proj_weight#1": torch.full((4,), 3.0),
        }
    )
    found = handle.state()
    assert found[queries].tolist() == [2.0] * 4
    assert found[keys].tolist() == [3.0] * 4


def test_rows_that_several_slices_own_get_the_smallest_factor_and_rows_of_nobody_one() -> (
    None
):
    weight = torch.zeros(6, 2)
    a = HeadSlice(parameter="w", axis=0, index=torch.tensor([[0, 1], [2, 3]]))
    b = HeadSlice(parameter="w", axis=0, index=torch.tensor([[3, 2, 4]]))
    lines = factor_per_row(
        [(a, torch.tensor([0.5, 2.0])), (b, torch.tensor([3.0]))], weight
    )
    assert lines.flatten().tolist() == [0.5, 0.5, 2.0, 2.0, 3.0, 1.0]


def test_the_settings_of_step_remedies_where_nothing_is_said_are_those_of_the_documents() -> (
    None
):
    made = [
        REMEDIES[name]()
        for name in ("lalr", "qk_clip", "qk_lr", "qk_weight_decay", "spectral_cap")
    ]
    lalr, clip, rate, decay, cap = made
    assert (lalr.tau, lalr.norm, lalr.decay) == (0.1, "frobenius", "scaled")  # type: ignore[attr-defined]
    assert (clip.threshold, clip.groups, clip.frozen) == (100.0, "query", "refuse")  # type: ignore[attr-defined]
    assert (rate.factor, decay.decay, cap.cap, cap.per) == (0.1, 0.1, 4.0, "head")  # type: ignore[attr-defined]
    assert all(one.on_steps for one in made)  # type: ignore[attr-defined]


# Weights that are frozen or unfrozen after a remedy has been applied.


def parts(weight: str, *, held: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Attention with one frozen weight, which the optimizer holds or not."""
    model = attention()
    model.get_parameter(weight).requires_grad_(False)
    own = [p for p in model.parameters() if held or p.requires_grad]
    return model, torch.optim.SGD(own, lr=0.1)


@pytest.mark.parametrize(
    "remedy", ["lalr", "qk_lr:factor=0", "frozen_qk", "qk_weight_decay"]
)
def test_a_frozen_weight_that_the_optimizer_holds_may_be_unfrozen(remedy: str) -> None:
    model, optimizer = parts("q_proj.weight", held=True)
    qkeel.apply(model, remedy, optimizer)
    grads = [*gradients(model, 2)]
    model.q_proj.weight.requires_grad_(True)
    for one in grads:
        step_by(model, optimizer, one)


def test_weights_that_were_frozen_later_are_not_clipped_unless_asked() -> None:
    x = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    for option, refused in (("", True), (",frozen=scale", False)):
        model = attention()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        qkeel.apply(model, f"qk_clip:threshold=0.001{option}", optimizer)
        model.q_proj.weight.requires_grad_(False)
        before = model.q_proj.weight.detach().clone()
        model(x).square().mean().backward()
        if refused:
            keys = model.k_proj.weight.detach() - 0.1 * model.k_proj.weight.grad
            with pytest.warns(
                QkeelWarning,
                match=r"does not clip the model itself while a query or key weight is frozen",
            ):
                optimizer.step()
            assert torch.allclose(model.k_proj.weight, keys, rtol=0, atol=1e-15)
        else:
            optimizer.step()
        assert torch.equal(model.q_proj.weight, before) is refused


def test_a_cap_never_changes_frozen_weights_and_is_refused_if_they_are_over_it() -> (
    None
):
    model, optimizer = parts("q_proj.weight", held=True)
    with pytest.raises(
        RefusedError, match=r"q_proj.weight is frozen with a singular value over 0.001"
    ):
        qkeel.apply(model, "spectral_cap:cap=0.001", optimizer)
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qkeel.apply(model, "spectral_cap:cap=0.001", optimizer)
    model.q_proj.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    assert torch.equal(model.q_proj.weight, before["q_proj.weight"])
    assert not torch.equal(model.k_proj.weight, before["k_proj.weight"])


def test_a_frozen_weight_that_momentum_still_moves_is_capped() -> None:
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.99)
    qkeel.apply(model, "spectral_cap:cap=0.5", optimizer)
    for i, grads in enumerate(gradients(model, 5)):
        step_by(model, optimizer, grads)
        model.q_proj.weight.requires_grad_(i < 1)
    heads = model.q_proj.weight.detach().unflatten(0, (4, -1))
    assert float(torch.linalg.matrix_norm(heads, 2).max()) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_that_was_capped_and_is_frozen_can_be_capped_again(seed: int) -> None:
    model = attention(torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.q_proj.weight.normal_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with qkeel.apply(model, "spectral_cap:cap=0.5", optimizer):
        step_by(model, optimizer, next(gradients(model, 1)))
    model.q_proj.weight.requires_grad_(False)
    qkeel.apply(model, "spectral_cap:cap=0.5", optimizer)


STATES = [
    "lalr",
    "lalr:norm=spectral",
    "qk_clip:threshold=0.5,steps=matched",
    "qk_lr",
    "softcap",
]


@pytest.mark.parametrize("saved", STATES[:3])
@pytest.mark.parametrize("loaded", [*STATES, "qk_clip:threshold=0.5"])
def test_the_state_of_another_remedy_is_refused(saved: str, loaded: str) -> None:
    handles = []
    for remedy in (saved, loaded):
        model = attention()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handles.append((qkeel.apply(model, remedy, optimizer), model, optimizer))
    if saved == loaded:
        handles[1][0].load(handles[0][0].state())
        return
    with pytest.raises(
        InvalidValueError, match="load the state of the same model and remedy"
    ):
        handles[1][0].load(handles[0][0].state())


def test_the_state_from_before_the_first_pass_can_be_loaded() -> None:
    model = FAMILIES["llama"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = qkeel.apply(model, "lalr", optimizer).state()
    assert state == {}
    other = FAMILIES["llama"].model()
    handle = qkeel.apply(other, "lalr", torch.optim.SGD(other.parameters(), lr=0.1))
    handle.load(state)
    run(other, batch())
    assert handle.state()
