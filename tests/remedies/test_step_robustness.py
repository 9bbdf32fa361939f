"""Step remedies on models and optimizers in odd states: one clear error each, or the same numbers as ever."""

import gc
import warnings

import pytest
import torch
from tests.attention import Attention, values
from tests.training import adamw, sgd, step

import qkeel
from qkeel.errors import RefusedError

from .foreign import example, hf, out
from .models import assert_same, decoder, snapshot
from .models import tokens as ids

STEP = ["lalr", "qk_lr", "qk_clip", "qk_weight_decay"]
every_remedy = pytest.mark.parametrize("remedy", STEP)


# --- optimizers


class ScheduleFree(torch.optim.Optimizer):
    """SGD on z while gradients are taken at y, which is pulled towards z: weights live in two places."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    z = state.setdefault("z", p.detach().clone())
                    state["k"] = state.get("k", 0) + 1
                    p.lerp_(z, 1 / (state["k"] + 1))
                    z.sub_(p.grad, alpha=group["lr"])
                    p.sub_(p.grad, alpha=group["lr"] * 0.9)


class Lookahead(torch.optim.SGD):
    """Every fifth step goes back half the way to slow weights."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                slow = state.setdefault("slow", p.detach().clone())
                state["n"] = state.get("n", 0) + 1
                if state["n"] % 5 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("kind", [ScheduleFree, Lookahead])
@pytest.mark.parametrize("remedy", ["qk_clip", "qk_weight_decay"])
def test_optimizers_that_would_bring_scaled_weights_back_are_refused(remedy, kind):
    model = hf("llama", "sdpa").train()
    optimizer = kind(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    with pytest.raises(
        RefusedError,
        match=f"{remedy} changes weights after the step, and {kind.__name__} would overwrite",
    ):
        qkeel.apply(model, remedy, optimizer, batch=example("llama"))
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize(
    ("remedy", "fused"), [*zip([*STEP, "spectral_cap"], [False, True] * 3)]
)
def test_a_step_that_a_scaler_skips_changes_nothing_on_a_foreign_model(remedy, fused):
    model = hf("gpt2", "sdpa").train()
    optimizer = adamw(model, fused=fused, weight_decay=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    option = {
        "qk_clip": ":threshold=0.1",
        "spectral_cap": ":cap=0.01",
    }.get(remedy, "")
    with qkeel.apply(model, remedy + option, optimizer, batch=example("llama")):
        for overflow in (True, False):
            before = values(model)
            optimizer.zero_grad()
            scaler.scale(out(model, example("llama")).mean()).backward()
            if overflow:
                model.get_parameter("transformer.ln_f.weight").grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            moved = [
                n for n, p in model.named_parameters() if not torch.equal(before[n], p)
            ]
            assert bool(moved) is not overflow
    assert all(p.isfinite().all() for p in model.parameters())


# Training that goes on without steps of the optimizer that a remedy was applied with.


def warned(record):
    return [str(w.message) for w in record if "has no effect" in str(w.message)]


def trained(model, optimizer, steps, batches_a_step=1):
    for _ in range(steps):
        step(model, optimizer, *[ids()] * batches_a_step)


@every_remedy
def test_passes_without_a_step_of_its_own_optimizer_are_warned_about_once(
    remedy, recwarn
):
    model = decoder()
    optimizer, other = adamw(model), adamw(model)
    handle = qkeel.apply(model, remedy, optimizer)
    trained(model, optimizer, 1, batches_a_step=12)  # accumulated gradients
    trained(model, other, 2)
    with torch.no_grad():
        for _ in range(12):
            model(ids())
    trained(model, optimizer, 1)
    trained(model, other, 2)
    assert not warned(recwarn)
    trained(model, other, 4)
    (message,) = warned(recwarn)
    assert "AdamW" in message
    handle.remove()
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("again", [False, True])
def test_a_remedy_that_ended_with_its_optimizer_is_warned_about_unless_it_was_applied_again(
    again, recwarn
):
    model = decoder()
    qkeel.apply(model, "lalr", adamw(model))
    gc.collect()
    optimizer = adamw(model)
    if again:
        qkeel.apply(model, "lalr", optimizer)
    trained(model, optimizer, 4)
    assert len(warned(recwarn)) == 1 - again


@every_remedy
def test_weights_that_are_replaced_after_apply_are_warned_about(remedy, recwarn):
    model = decoder()
    optimizer = adamw(model)
    qkeel.apply(model, remedy, optimizer)
    trained(model, optimizer, 1)
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    trained(model, optimizer, 1)
    assert not warned(recwarn)
    model.load_state_dict(
        {name: x.clone() for name, x in model.state_dict().items()}, assign=True
    )
    trained(model, optimizer, 2)
    assert len(warned(recwarn)) == 1


@pytest.mark.parametrize("remedy", ["lalr", "qk_lr"])
def test_a_model_that_is_cast_to_half_precision_after_apply_is_refused_in_the_step(
    remedy,
):
    model = decoder()
    optimizer = adamw(model)
    qkeel.apply(model, remedy, optimizer)
    trained(model, optimizer, 1)
    model.to(torch.bfloat16)
    with pytest.raises(RefusedError, match="bfloat16"):
        trained(model, optimizer, 1)


class Layers(torch.nn.Module):
    """Layers one after the other, each of which may be one of qkeel's."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SelfAttention(torch.nn.MultiheadAttention):
    """torch's own, of one argument."""

    def forward(self, x):
        return super().forward(x, x, x)[0]


LAYERS = {
    "plain": lambda: Attention(m=16),
    "own": lambda: qkeel.nn.Attention(16, 2),
    "torch": lambda: SelfAttention(16, 2, batch_first=True),
}


@pytest.mark.parametrize(
    ("earlier", "later"), [("plain", "plain"), ("own", "own"), ("plain", "torch")]
)
@pytest.mark.parametrize("remedy", [*STEP, "frozen_qk", "spectral_cap"])
def test_attention_that_is_put_in_later_is_told_once(remedy, earlier, later):
    layer = LAYERS[earlier]
    torch.manual_seed(0)
    model, x = Layers(layer(), layer()), torch.randn(2, 5, 16)
    optimizer = sgd(model)
    with (
        warnings.catch_warnings(record=True) as warned,
        qkeel.apply(model, remedy, optimizer, batch=x),
    ):
        warnings.simplefilter("always")
        for number in range(4):
            if number == 2:
                assert warned == []
                # Without attention, it is no layer.
                model.layers.append(torch.nn.Linear(16, 16))
                model.layers.append(LAYERS[later]())
            step(model, optimizer, x)
    (said,) = [str(w.message) for w in warned]
    assert said.startswith(f"{remedy} does not act on layers.3, which was put")
