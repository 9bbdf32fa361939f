"""What an autopilot cannot do: what sites and optimizers refuse, remedies of others, and a norm where it is allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autopilot.runs import EXAMPLE, Run, adamw, equal, foreign, run
from torch import nn

import qkeel
from qkeel.autopilot import Action, Decision, Ladder, Records
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    UnknownNameError,
)
from qkeel.nn import Decoder, DecoderConfig
from qkeel.sites.find import find_sites

WATCH, CLIP, RATES, NORM, NONE = Action
AT_ONCE = "ladder:threshold=20,patience=2"
# So impatient that it asks for more before the clip has acted.
BOUNDLESS = "ladder:threshold=5,patience=1,every=1,allow_new_parameters=true"


def latent() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 32, "n_heads": 4, "n_layers": 1}
    return Decoder(DecoderConfig(**sizes, attention="mla"))  # type: ignore[arg-type]


def hot(model: nn.Module) -> nn.Module:
    """The model with logits of thousands, so that there is an alarm at the first record."""
    sites = find_sites(model, EXAMPLE)
    queries = {part.parameter for site in sites for part in site.query}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in queries or "norm" in name.partition(".")[0]:
                p.mul_(1e4)
    return model


def steady(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, 1e-4)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=1e-4)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


# What is trained, by which optimizer, under which remedy of somebody else; the words of what is refused, by action; the
# actions that are taken, in order.
CASES: dict[str, tuple[Callable[[], nn.Module], Any, str, dict[Action, str], Any]] = {
    "nothing special": (foreign, steady, "", {}, [CLIP]),
    "fused q, k and v": (lambda: foreign(kind="fused"), steady, "", {}, [CLIP]),
    "grouped keys": (lambda: foreign(kind="grouped"), steady, "", {}, [CLIP]),
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
    name: str,
) -> None:
    make, optimizer_of, by_hand, refused, taken = CASES[name]

    def prepared() -> tuple[Run, Any]:
        model, handle = make(), None
        optimizer = optimizer_of(model)
        if by_hand:
            handle = qkeel.apply(model, by_hand, optimizer, batch=EXAMPLE)
        return Run(hot(model), optimizer), handle

    within, handle = prepared()
    before = within.left()
    pilot = qkeel.autopilot(within.model, within.optimizer, policy=AT_ONCE, every=1)
    within.train(0, 8)
    reasons = {x.action: x.reason for x in pilot.refused if x.action != NORM}
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


class Asks(Ladder):
    """Asks for a clip at the first record, and for a norm at the third."""

    def decide(self, records: Records) -> tuple[Decision, ...]:
        about = {"step": records.step, "rule": "r", "reason": "r"}
        clip = {"action": CLIP, "remedy": "qk_clip:threshold=20"}
        return {
            1: (Decision(site=records.sites[0].name, **clip, **about),),
            3: (Decision(action=NORM, remedy="qk_norm", **about),),
        }.get(len(records.history), ())


def test_a_norm_that_is_refused_leaves_in_force_what_it_would_have_replaced() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)

    model = foreign()
    names = [name for name, _ in model.named_parameters()]
    optimizer = muon(model)
    pilot = qkeel.autopilot(model, optimizer, policy=Asks(), every=1, batch=EXAMPLE)
    Run(model, optimizer).train(0, 8)
    (refused,) = [event for event in pilot.events if event["event"] == "refused"]
    assert "matrices only" in refused["reason"]
    assert [spec for spec, _ in pilot.remedies.handles] == ["qk_clip:threshold=20"]
    assert names == [name for name, _ in model.named_parameters()]
    # With the optimizer of the vectors besides, the gains join that.
    model = foreign()
    vectors = adamw(nn.ParameterList([p for p in model.parameters() if p.ndim < 2]))
    optimizers = [muon(model), vectors]
    qkeel.autopilot(model, optimizers, policy=Asks(), every=1, batch=EXAMPLE)
    Run(model, optimizers[0]).train(0, 8)
    gain = model.get_parameter("q_norm.weight")
    assert any(p is gain for group in vectors.param_groups for p in group["params"])


def test_a_calibrated_norm_is_trained_kept_in_checkpoints_and_comes_off() -> None:
    whole = run(policy=BOUNDLESS, batch=EXAMPLE)
    (group,) = whole.optimizer.param_groups
    kept = len(group["params"])
    decision = next(d for d in whole.train(0, 6).pilot.decisions if d.action is NORM)
    assert (decision.step, decision.site) == (4, None)
    assert not whole.pilot.remedies.handles
    gains = {name: p for name, p in whole.model.named_parameters() if "norm" in name}
    assert gains.keys() == {"q_norm.weight", "k_norm.weight"}
    assert {id(p) for p in gains.values()} <= {id(p) for p in group["params"]}
    start = {name: p.detach().clone() for name, p in gains.items()}
    whole.train(6, 9)
    assert not any(torch.equal(p, start[name]) for name, p in gains.items())
    again = run(foreign(1), policy=BOUNDLESS, batch=EXAMPLE)
    for loaded, saved in (
        (again.pilot, whole.pilot),
        (again.model, whole.model),
        (again.optimizer, whole.optimizer),
    ):
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert again.train(9).losses == whole.train(9).losses[9:]
    assert equal(again.bits(), whole.bits())
    assert whole.pilot.events == again.pilot.events
    # How far a trained logit falls depends on the rounding of 24 steps at this rate. No arithmetic lets it pass the
    # bound of its gains: unit directions of length √d each, times the scale 1/√d.
    largest = (gains["q_norm.weight"] * gains["k_norm.weight"]).detach().abs().max()
    whole.pilot.close()  # the norm stays
    with qkeel.watch(whole.model.eval()) as monitor:
        whole.model(EXAMPLE)
        (stats,) = monitor.read().values()
    assert (stats.max_abs_logit <= 8**0.5 * largest * (1 + 1e-5)).all()
    trained = whole.bits()
    whole.pilot.remove()
    assert not [name for name, _ in whole.model.named_parameters() if "norm" in name]
    assert len(group["params"]) == kept == len(whole.optimizer.state)
    # As trained, not as they were when it came.
    assert equal(whole.bits(), {name: trained[name] for name in whole.bits()})
    assert not any(whole.left())


@pytest.mark.parametrize(
    ("optimizer", "policy", "error"),
    [
        (None, "ladder", InvalidTypeError),
        ([], "ladder", InvalidTypeError),
        ("adamw", "lader", UnknownNameError),
        ("adamw", "ladder:treshold=3", UnknownNameError),
        ("adamw", "ladder:threshold=-3", InvalidValueError),
        ("adamw", "ladder+ladder", InvalidValueError),
        ("adamw", 3, InvalidTypeError),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_applied(
    optimizer: Any, policy: Any, error: type[Exception]
) -> None:
    model = foreign()
    trained = adamw(model)
    with pytest.raises(error):
        qkeel.autopilot(
            model, trained if optimizer == "adamw" else optimizer, policy=policy
        )
    assert not any(Run(model, trained).left())


def test_a_state_that_is_none_of_this_autopilot_is_refused() -> None:
    state = run().train(0, 8).pilot.state_dict()
    with pytest.raises(RefusedError, match="batch=batch"):
        run(foreign(1)).pilot.load_state_dict(state)
    for pilot, wrong in (
        (run().pilot, {}),
        (run(policy="ladder", batch=EXAMPLE).pilot, state),
        (run().train(0, 2).pilot, state),
    ):
        with pytest.raises(InvalidValueError):
            pilot.load_state_dict(wrong)
