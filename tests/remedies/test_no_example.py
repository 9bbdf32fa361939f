"""`qkeel.apply` without an example: on a watched model its sites are known, on another the next pass shows them."""

import types

import pytest
import torch
from tests.attention import Attention, from_heads, scores, values
from tests.drawing import randn
from tests.training import sgd
from torch import nn

import qkeel
from qkeel.errors import RefusedError


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def batch(step):
    return randn(4, 6, 16, seed=step)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, first, last):
    for step in range(first, last):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return values(model)


def equal(a, b):
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


SPECS = ["lalr:tau=0.1+qk_clip:threshold=0.1", "qk_norm", "softcap:cap=1"]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_the_line_in_front_of_training_does_what_it_does_with_an_example(spec, watched):
    shown, own = encoder(), encoder()
    first, second = adamw(shown), adamw(own)
    qkeel.apply(shown, spec, first, batch=batch(0))
    monitor = qkeel.watch(own, second) if watched else None
    handle = qkeel.apply(own, spec, second)
    assert "next pass" in repr(handle)
    train(shown, first, 0, 4)
    train(own, second, 0, 4)
    assert repr(handle).startswith("<Handle of ")
    assert "active, " in repr(handle)
    assert equal(shown, own)
    assert monitor is None or monitor.active
    handle.remove()
    assert torch.equal(own(batch(9)), copy_of_plain(own)(batch(9)))


@pytest.mark.parametrize("spec", [SPECS[0], "qk_weight_decay:decay=0.5"])
def test_a_step_with_a_closure_is_changed_from_the_first_one_on(spec):
    """The pass that shows the attention runs inside that step, as in Lightning."""
    models = encoder(), encoder()
    for model, shown in zip(models, (batch(0), None)):
        optimizer = adamw(model)
        handle = qkeel.apply(model, spec, optimizer, batch=shown)
        for step in range(3):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()

            optimizer.step(closure)
        assert "active, " in repr(handle)
        handle.remove()
        assert not optimizer._optimizer_step_pre_hooks
    assert equal(*models)


def copy_of_plain(model):
    plain = encoder()
    plain.load_state_dict(
        {
            name: x
            for name, x in model.state_dict().items()
            if name in plain.state_dict()
        }
    )
    return plain


@pytest.mark.parametrize("spec", SPECS)
def test_the_line_in_the_middle_of_a_watched_training_acts_at_once(spec):
    shown, own = encoder(), encoder()
    first, second = adamw(shown), adamw(own)
    with qkeel.watch(own, second) as monitor:
        train(shown, first, 0, 2)
        train(own, second, 0, 2)
        qkeel.apply(shown, spec, first, batch=batch(1))
        handle = qkeel.apply(own, spec, second)
        assert "active, " in repr(handle)
        train(shown, first, 2, 5)
        train(own, second, 2, 5)
        assert equal(shown, own)
        assert monitor.active


def test_remedies_on_steps_of_a_watched_model_make_no_pass_at_all(
    monkeypatch,
):
    model = encoder()
    optimizer = adamw(model)
    with qkeel.watch(model, optimizer):
        train(model, optimizer, 0, 1)
        monkeypatch.setattr(nn.TransformerEncoder, "forward", None)
        assert qkeel.apply(model, "lalr:tau=0.1", optimizer).active


def test_what_is_refused_is_refused_in_the_pass_and_the_model_is_as_it_was():
    model = encoder()
    optimizer = adamw(model)
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
        optimizer = adamw(model)
        monitor = qkeel.watch(model, optimizer) if watched else None
        qkeel.apply(model, spec, optimizer, batch=shown)
        for step in range(3):
            filled = cache()
            with torch.no_grad():
                for token in range(3):
                    model(batch(step)[:, token : token + 1], filled)
            train(model, optimizer, step, step + 1)
        assert monitor is None or (monitor.active and len(monitor.sites) == 1)
        models.append(model)
    assert equal(*models)


def test_a_program_that_looks_for_its_batch_size_gets_its_own_error():
    model = Heads()
    optimizer = sgd(model)
    handle = qkeel.apply(model, "lalr", optimizer)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(8, 5, 32))
    model(torch.randn(2, 5, 32)).square().mean().backward()
    optimizer.step()
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
