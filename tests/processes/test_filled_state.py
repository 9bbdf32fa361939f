"""torch fills an optimizer's state by a step with rate 0 and gradients 0 when a checkpoint asks for it: that step is
none for the monitor and the remedies."""

import itertools
import warnings

import pytest
import torch
from tests.drawing import randint
from tests.quick import quick
from tests.training import adamw
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional as F

import qkeel
from qkeel.errors import QkeelWarning

STEPS = 3
REMEDIES = (
    "none",
    "lalr:tau=0.1",
    "qk_lr:factor=0.5",
    "qk_clip:threshold=1",
    "qk_clip:threshold=1,steps=matched",
    "qk_weight_decay:decay=0.3",
    "spectral_cap:cap=0.3",
    "frozen_qk",
    "qk_norm",
)


def batch(step):
    return randint(0, 64, (2, 12), seed=step)


def trained(remedy, *, filled_first, sgd=False):
    """The weights, the recorded steps and the warnings of a run whose optimizer's state torch fills before or after
    the remedy and the monitor came."""
    torch.manual_seed(0)
    model = qkeel.nn.Decoder(
        qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4)
    ).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.mul_(3)
    optimizer = adamw(model, 0.01)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if filled_first and remedy != "qk_norm":
            get_state_dict(model, optimizer)
        qkeel.apply(model, remedy, optimizer, batch=batch(0))
        if filled_first and remedy == "qk_norm":  # whose gains have a state too
            get_state_dict(model, optimizer)
        monitor = qkeel.watch(model, optimizer, every=1, rules=[])
        if not filled_first:
            get_state_dict(model, optimizer)
        for step in range(STEPS):
            F.cross_entropy(
                model(batch(step)).flatten(0, 1), batch(step).roll(-1, 1).flatten()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = monitor.history.steps.tolist()
    monitor.close()
    warned = [str(w.message) for w in said if isinstance(w.message, QkeelWarning)]
    return {n: p.detach() for n, p in model.named_parameters()}, steps, warned


# SGD has no state that a remedy reads: one of each kind of remedy stands for the others.
@pytest.mark.parametrize(
    ("remedy", "sgd"),
    quick(
        itertools.product(REMEDIES, (False, True)),
        lambda case: not case[1] or case[0] in ("none", "lalr:tau=0.1"),
    ),
)
def test_the_step_that_fills_an_optimizers_state_is_none(remedy, sgd):
    before, *_ = trained(remedy, filled_first=True, sgd=sgd)
    after, steps, warned = trained(remedy, filled_first=False, sgd=sgd)
    assert steps == [*range(STEPS)]
    assert not [one for one in warned if "pass" in one or "step" in one]
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


def test_remedies_that_wait_for_a_pass_wait_on_when_the_state_is_filled():
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 32),
        torch.nn.TransformerEncoderLayer(32, 4, batch_first=True),
    )
    optimizer = adamw(model)
    handle = qkeel.apply(model, "lalr", optimizer)
    get_state_dict(model, optimizer)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert handle.active
    assert handle.state()


def test_a_real_step_with_rate_and_gradients_of_zero_is_a_step():
    model = qkeel.nn.Decoder(
        qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4)
    )
    optimizer = adamw(model, 0.0)
    with qkeel.watch(model, optimizer, every=1, rules=[]) as monitor:
        (0 * model(batch(0)).sum()).backward()
        optimizer.step()
        assert monitor.steps == 1
