"""`qkeel.apply` without an example: on a watched model its sites are known, on another the next pass shows them."""

import types

import pytest
import torch
from tests.attention import Attention, from_heads, scores, values
from tests.drawing import randn
from tests.training import adamw, sgd, step
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.errors import RefusedError


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def batch(step):
    return randn(4, 6, 16, seed=step)


def train(model, optimizer, first, last):
    for number in range(first, last):
        step(model, optimizer, batch(number))


def assert_equal(a, b):
    """Two models have the same weights bit for bit."""
    assert_close(values(a), values(b), rtol=0, atol=0)


SPECS = ["lalr:tau=0.1+qk_clip:threshold=0.1", "qk_norm", "softcap:cap=1"]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_the_line_in_front_of_training_does_what_it_does_with_an_example(spec, watched):
    shown, own = encoder(), encoder()
    first, second = adamw(shown, 0.05), adamw(own, 0.05)
    qkeel.apply(shown, spec, first, batch=batch(0))
    monitor = qkeel.watch(own, second) if watched else None
    handle = qkeel.apply(own, spec, second)
    assert "next pass" in repr(handle)
    train(shown, first, 0, 4)
    train(own, second, 0, 4)
    assert repr(handle).startswith("<Handle of ")
    assert "active, " in repr(handle)
    assert_equal(shown, own)
    assert monitor is None or monitor.active
    handle.remove()
    plain = encoder()
    plain.load_state_dict(own.state_dict())
    assert torch.equal(own(batch(9)), plain(batch(9)))


@pytest.mark.parametrize("spec", [SPECS[0], "qk_weight_decay:decay=0.5"])
def test_a_step_with_a_closure_is_changed_from_the_first_one_on(spec):
    """The pass that shows the attention runs inside that step, as in Lightning."""
    models = encoder(), encoder()
    for model, shown in zip(models, (batch(0), None)):
        optimizer = adamw(model, 0.05)
        handle = qkeel.apply(model, spec, optimizer, batch=shown)
        for number in range(3):

            def closure(model=model, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                model(batch(number)).square().mean().backward()

            optimizer.step(closure)
        assert "active, " in repr(handle)
        handle.remove()
        assert not optimizer._optimizer_step_pre_hooks
    assert_equal(*models)


@pytest.mark.parametrize("spec", SPECS)
def test_the_line_in_the_middle_of_a_watched_training_acts_at_once(spec):
    shown, own = encoder(), encoder()
    first, second = adamw(shown, 0.05), adamw(own, 0.05)
    with qkeel.watch(own, second) as monitor:
        train(shown, first, 0, 2)
        train(own, second, 0, 2)
        qkeel.apply(shown, spec, first, batch=batch(1))
        handle = qkeel.apply(own, spec, second)
        assert "active, " in repr(handle)
        train(shown, first, 2, 5)
        train(own, second, 2, 5)
        assert_equal(shown, own)
        assert monitor.active


def test_remedies_on_steps_of_a_watched_model_make_no_pass_at_all(
    monkeypatch,
):
    model = encoder()
    optimizer = adamw(model, 0.05)
    with qkeel.watch(model, optimizer):
        train(model, optimizer, 0, 1)
        monkeypatch.setattr(nn.TransformerEncoder, "forward", None)
        assert qkeel.apply(model, "lalr:tau=0.1", optimizer).active


def test_what_is_refused_is_refused_in_the_pass_and_the_model_is_as_it_was():
    model = encoder()
    optimizer = adamw(model, 0.05)
    out = model(batch(0))
    qkeel.apply(model, "qk_norm+lalr", optimizer)
    with pytest.raises(RefusedError, match="lalr"):
        model(batch(0))
    assert torch.equal(model(batch(0)), out)
    assert not model._forward_pre_hooks
    with pytest.raises(RefusedError, match="batch=batch"):
        qkeel.apply(
            model, "softcap:cap=30"
        )  # nothing would notice if the model were never called


class Heads(Attention):
    """Attention of four heads over normed tokens; batches of more than four samples do not fit."""

    def __init__(self):
        super().__init__(m=32, heads=4)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(self.norm(x))


class Cached(Attention):
    """Written-out attention with a cache, a dict or an object, that each call extends."""

    def __init__(self):
        super().__init__(m=16)
        self.out = nn.Linear(16, 16)

    def forward(self, x, cache=None):
        q, k, v = self.heads(x)
        held = cache if cache is None or isinstance(cache, dict) else vars(cache)
        if held is not None:
            if held:
                k, v = torch.cat([held["k"], k], 2), torch.cat([held["v"], v], 2)
            held.update(k=k, v=v)
        n, m = q.shape[2], k.shape[2]
        hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
        weights = scores(q, k).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out(from_heads(weights @ v))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Cached()

    def forward(self, x, cache=None):
        return x + self.attention(x, cache)


@pytest.mark.parametrize(
    ("spec", "watched", "cache"),
    [
        *zip(SPECS, (False, True, False), (dict, types.SimpleNamespace, dict)),
        *zip(
            ["qk_clip:threshold=0.1"] * 2, (True, False), (dict, types.SimpleNamespace)
        ),
    ],
)
def test_a_rollout_that_fills_a_cache_may_be_the_first_pass(spec, watched, cache):
    models = []
    for shown in (batch(0), None):
        torch.manual_seed(0)
        model = Decoder()
        optimizer = adamw(model, 0.05)
        monitor = qkeel.watch(model, optimizer) if watched else None
        qkeel.apply(model, spec, optimizer, batch=shown)
        for number in range(3):
            filled = cache()
            with torch.no_grad():
                for token in range(3):
                    model(batch(number)[:, token : token + 1], filled)
            train(model, optimizer, number, number + 1)
        assert monitor is None or (monitor.active and len(monitor.sites) == 1)
        models.append(model)
    assert_equal(*models)


def test_a_program_that_looks_for_its_batch_size_gets_its_own_error():
    model = Heads()
    optimizer = sgd(model)
    handle = qkeel.apply(model, "lalr", optimizer)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(8, 5, 32))
    step(model, optimizer, torch.randn(2, 5, 32))
    assert handle.state()
    assert "next pass" not in repr(handle)


@pytest.mark.parametrize("remedy", ["qk_clip:threshold=15", "lalr", "frozen_qk"])
def test_a_pass_under_autocast_shows_the_rows_of_weights(remedy):
    """Autocast keeps casts of weights until its context ends, also where the search changes the weights."""
    model = nn.Sequential(Heads())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = qkeel.apply(model, remedy, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(2, 16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    assert "next pass" not in repr(handle)
