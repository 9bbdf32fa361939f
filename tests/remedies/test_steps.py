"""The mechanism of per-head steps: identity, memory, host reads, exceptions, scalers, resume, other hooks."""

import copy

import pytest
import torch
from tests.attention import values
from tests.training import sgd
from torch.testing import assert_close

import qkeel
from qkeel.errors import InvalidValueError, QkeelWarning, RefusedError

from .models import D_MODEL, attention, gradients, step_by


def test_a_subclass_whose_step_calls_its_parents_is_scaled_once():
    # Both run the hooks of the optimizer.
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    models = attention(), attention()
    for model, kind in zip(models, (torch.optim.SGD, Outer)):
        optimizer = kind(model.parameters(), lr=0.1)
        qkeel.apply(model, "lalr", optimizer)
        for grads in gradients(model, 3):
            step_by(model, optimizer, grads)
    assert_close(*map(values, models), rtol=0, atol=0)


def test_other_post_hooks_see_the_scaled_weights():
    model = attention()
    optimizer = sgd(model, 1.0)
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(model.q_proj.weight.detach().clone())
    )  # an average, say
    qkeel.apply(model, "qk_lr:factor=0.5", optimizer)
    step_by(model, optimizer, next(gradients(model, 1)))
    assert torch.equal(seen[0], model.q_proj.weight)


def test_the_state_is_named_by_weights_and_another_models_is_refused():
    model = attention(torch.float32)
    handle = qkeel.apply(model, "softcap+lalr", sgd(model))
    state = handle.state()
    query, key = (
        f"1.{name}_proj.weight:0/{n}x{D_MODEL // 4}" for name, n in (("q", 4), ("k", 2))
    )
    assert {k: tuple(v.shape) for k, v in state.items()} == {query: (4,), key: (2,)}
    with pytest.raises(
        InvalidValueError, match="load the state of the same model and remedy"
    ):
        handle.load({query: state[query]})
    with pytest.raises(InvalidValueError, match=r"for k_proj.weight:0/2x4, got \(3,\)"):
        handle.load({**state, key: torch.ones(3)})
    with pytest.raises(InvalidValueError):
        handle.load({**state, "1.v_proj.weight:0/2x4": torch.ones(2)})


# Weights that are frozen or unfrozen after a remedy has been applied.


def parts(weight, *, held):
    """Attention with one frozen weight, which the optimizer holds or not."""
    model = attention()
    model.get_parameter(weight).requires_grad_(False)
    own = [p for p in model.parameters() if held or p.requires_grad]
    return model, torch.optim.SGD(own, lr=0.1)


@pytest.mark.parametrize(
    "remedy", ["lalr", "qk_lr:factor=0", "frozen_qk", "qk_weight_decay"]
)
def test_a_frozen_weight_that_the_optimizer_holds_may_be_unfrozen(remedy):
    model, optimizer = parts("q_proj.weight", held=True)
    qkeel.apply(model, remedy, optimizer)
    grads = [*gradients(model, 2)]
    model.q_proj.weight.requires_grad_(True)
    for one in grads:
        step_by(model, optimizer, one)


def test_weights_that_were_frozen_later_are_not_clipped_unless_asked():
    x = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    for option, refused in (("", True), (",frozen=scale", False)):
        model = attention()
        optimizer = sgd(model)
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


def test_a_cap_never_changes_frozen_weights_and_is_refused_if_they_are_over_it():
    model, optimizer = parts("q_proj.weight", held=True)
    with pytest.raises(
        RefusedError, match=r"q_proj.weight is frozen with a singular value over 0.001"
    ):
        qkeel.apply(model, "spectral_cap:cap=0.001", optimizer)
    model = attention()
    optimizer = sgd(model)
    qkeel.apply(model, "spectral_cap:cap=0.001", optimizer)
    model.q_proj.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    assert torch.equal(model.q_proj.weight, before["q_proj.weight"])
    assert not torch.equal(model.k_proj.weight, before["k_proj.weight"])
