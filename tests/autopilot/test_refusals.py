"""What an autopilot cannot do: what sites and optimizers refuse, remedies of others, and a norm where it is allowed."""

import pytest
import torch
from tests.autopilot.runs import EXAMPLE, Run, adamw, equal, foreign, run

import qkeel
from qkeel.autopilot import Action
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnknownNameError,
)
from qkeel.nn import Decoder, DecoderConfig
from qkeel.sites.find import find_sites

WATCH, CLIP, RATES, NONE = Action
AT_ONCE = "ladder:threshold=20,patience=2"


def latent():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 32, "n_heads": 4, "n_layers": 1}
    return Decoder(DecoderConfig(**sizes, attention="mla"))


def hot(model):
    """The model with logits of thousands, so that there is an alarm at the first record."""
    sites = find_sites(model, EXAMPLE)
    queries = {part.parameter for site in sites for part in site.query}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in queries or "norm" in name.partition(".")[0]:
                p.mul_(1e4)
    return model


def steady(model):
    return adamw(model, 1e-4)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=1e-4)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters())


# What is trained, by which optimizer, under which remedy of somebody else; the words of what is refused, by action; the
# actions that are taken, in order.
CASES = {
    "nothing special": (foreign, steady, "", {}, [CLIP]),
    "q and k of one weight": (lambda: foreign(kind="tied"), steady, "", {}, [CLIP]),
    "latent attention": (latent, steady, "", {}, [CLIP]),
    "frozen q": (
        lambda: foreign(kind="frozen"),
        steady,
        "",
        {CLIP: "q.weight, which is frozen"},
        [RATES, NONE],
    ),
    "normed q and k": (
        lambda: foreign(kind="normed"),
        steady,
        "",
        {CLIP: "a norm", RATES: "a norm"},
        [NONE],
    ),
    "Adafactor": (foreign, adafactor, "", {RATES: "half the rate"}, [CLIP]),
    "LBFGS": (foreign, lbfgs, "", {CLIP: "LBFGS", RATES: "closure"}, [NONE]),
    "clipped by hand": (
        foreign,
        steady,
        "qk_clip:threshold=1e6",
        {CLIP: "already"},
        [RATES, NONE],
    ),
    "lalr by hand": (foreign, steady, "lalr", {RATES: "already"}, [CLIP]),
    "norm by hand": (
        foreign,
        steady,
        "qk_norm",
        {CLIP: "a norm", RATES: "a norm"},
        [NONE],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_gives_way_to_the_next_action_and_nothing_is_half_applied(
    name,
):
    make, optimizer_of, by_hand, refused, taken = CASES[name]

    def prepared():
        model, handle = make(), None
        optimizer = optimizer_of(model)
        if by_hand:
            handle = qkeel.apply(model, by_hand, optimizer, batch=EXAMPLE)
        return Run(hot(model), optimizer), handle

    within, handle = prepared()
    before = within.left()
    pilot = qkeel.autopilot(within.model, within.optimizer, policy=AT_ONCE, every=1)
    within.train(0, 8)
    reasons = {x.action: x.reason for x in pilot.refused}
    assert reasons.keys() == refused.keys()
    assert all(words in reasons[action] for action, words in refused.items())
    assert [d.action for d in pilot.decisions if d.action is not WATCH] == taken
    pilot.remove()
    assert within.left() == before
    if taken == [NONE]:
        without, _ = prepared()
        assert without.train(0, 8).losses == within.losses
        assert equal(within.bits(), without.bits())
    if handle is not None:
        handle.remove()
        assert not any(within.left())


@pytest.mark.parametrize(
    ("optimizer", "policy", "error"),
    [
        (None, "ladder", InvalidTypeError),
        ([], "ladder", InvalidTypeError),
        ("adamw", "lader", UnknownNameError),
        ("adamw", "ladder:allow_new_parameters=true", UnknownNameError),
        ("adamw", "ladder:threshold=-3", InvalidValueError),
        ("adamw", "ladder+ladder", InvalidValueError),
        ("adamw", 3, InvalidTypeError),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_applied(optimizer, policy, error):
    model = foreign()
    trained = adamw(model)
    with pytest.raises(error):
        qkeel.autopilot(
            model, trained if optimizer == "adamw" else optimizer, policy=policy
        )
    assert not any(Run(model, trained).left())


def test_a_state_that_is_none_of_this_autopilot_is_refused():
    state = run().train(0, 8).pilot.state_dict()
    for pilot, wrong in (
        (run().pilot, {}),
        (run(policy="ladder", batch=EXAMPLE).pilot, state),
        (run().train(0, 2).pilot, state),
    ):
        with pytest.raises(InvalidValueError):
            pilot.load_state_dict(wrong)


def test_the_record_of_the_last_step_is_judged_at_the_end():
    model = foreign()
    within = Run(model, steady(model))
    pilot = qkeel.autopilot(model, within.optimizer, policy=AT_ONCE, every=1)
    with pilot:
        within.train(0, 6)
        assert pilot.recording.history.steps[-1] == 4  # a step later each
    assert pilot.recording.history.steps[-1] == 5
    assert not pilot.active
