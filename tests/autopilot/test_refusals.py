"""What an autopilot cannot do: what sites and optimizers refuse, remedies of others, and a norm where it is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.autopilot.runs import Run, adamw, batches, decoder, equal, foreign, run
from torch import Tensor, nn
from torch.nn import functional as F

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

EXAMPLE = next(batches())[:, :-1]
CLIP, RATES, NORM, NONE = Action.CLIP, Action.RATES, Action.NORM, Action.NONE
AT_ONCE = "ladder:threshold=20,patience=2"
# So impatient that it asks for more before the clip has acted.
BOUNDLESS = "ladder:threshold=5,patience=1,every=1,allow_new_parameters=true"


class Signs(torch.optim.Optimizer):
    """A step of the sign of the gradient times the rate, as Lion's without momentum."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


def latent() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(vocab_size=32, d_model=32, n_heads=4, n_layers=1, attention="mla")
    )


def hot(model: nn.Module) -> nn.Module:
    """The model with logits of thousands, so that there is an alarm at the first record."""
    queries = {
        part.parameter for site in find_sites(model, EXAMPLE) for part in site.query
    }
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(
                1e4
                if name in queries
                or name.partition(".")[0] in ("norms", "q_norm", "k_norm")
                else 1.0
            )
    return model


# What is trained, by which optimizer, under which remedy of somebody else; the words of what is refused, by action; the
# actions that are taken, in order.
Row = tuple[Callable[[], nn.Module], Any, str, dict[Action, str], list[Action]]


def steady(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, 1e-4)


CASES: dict[str, Row] = {
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
    "signs": (foreign, lambda m: Signs(m.parameters()), "", {}, [CLIP]),
    "Adafactor": (
        foreign,
        lambda m: torch.optim.Adafactor(m.parameters()),
        "",
        {RATES: "half the rate"},
        [CLIP],
    ),
    "Rprop": (
        foreign,
        lambda m: torch.optim.Rprop(m.parameters()),
        "",
        {RATES: "half the rate"},
        [CLIP, NONE],
    ),
    "LBFGS": (
        foreign,
        lambda m: torch.optim.LBFGS(m.parameters(), lr=1e-4),
        "",
        {CLIP: "LBFGS", RATES: "closure"},
        [NONE],
    ),
    "clipped by hand": (
        foreign,
        steady,
        "qk_clip:threshold=1e6",
        {CLIP: "already"},
        [RATES, NONE],
    ),
    "lalr by hand": (foreign, steady, "lalr", {RATES: "already"}, [CLIP]),
    "softcap by hand": (foreign, steady, "softcap:cap=50", {}, [CLIP]),
    "norm by hand": (
        foreign,
        steady,
        "qk_norm",
        {CLIP: "a norm", RATES: "a norm"},
        [NONE],
    ),
}


def prepared(make: Any, optimizer_of: Any, by_hand: str) -> tuple[Run, Any]:
    model = make()
    optimizer = optimizer_of(model)
    handle = qkeel.apply(model, by_hand, optimizer, batch=EXAMPLE) if by_hand else None
    return Run(hot(model), optimizer), handle


def left(one: Run) -> list[Any]:
    """Hooks and marks on a model and its optimizer."""
    hooks: list[Any] = [
        one.optimizer._optimizer_step_pre_hooks,
        one.optimizer._optimizer_step_post_hooks,
    ]
    for module in one.model.modules():
        hooks += [
            module._forward_pre_hooks,
            module._forward_hooks,
            vars(module).get("_qkeel_applied", {}),
        ]
    return [len(held) for held in hooks]


def test_what_is_refused_gives_way_to_the_next_action_and_nothing_is_half_applied() -> (
    None
):
    for name, (make, optimizer_of, by_hand, refused, taken) in CASES.items():
        within, handle = prepared(make, optimizer_of, by_hand)
        before = left(within)
        within.pilot = pilot = qkeel.autopilot(
            within.model, within.optimizer, policy=AT_ONCE, every=1
        )
        within.train(0, 8)
        own = {one.action: one.reason for one in pilot.refused if one.action != NORM}
        assert own.keys() == refused.keys(), (name, own)
        assert all(words in own[action] for action, words in refused.items()), (
            name,
            own,
        )
        assert [
            d.action for d in pilot.decisions if d.action is not Action.WATCH
        ] == taken, name
        pilot.remove()
        assert left(within) == before, name
        if taken == [NONE]:
            without, _ = prepared(make, optimizer_of, by_hand)
            assert without.train(0, 8).losses == within.losses, name
            assert equal(within.bits(), without.bits()), name
        if handle is not None:
            handle.remove()
            assert not any(left(within)), name


class Asks(Ladder):
    """Asks for a norm at the third record, under a clip of the first."""

    def decide(self, records: Records) -> tuple[Decision, ...]:
        about = {"step": records.step, "rule": "r", "reason": "r"}
        if len(records.history) == 1:
            return (
                Decision(
                    action=CLIP,
                    site=records.sites[0].name,
                    remedy="qk_clip:threshold=20",
                    **about,
                ),
            )
        return (
            (Decision(action=NORM, remedy="qk_norm", **about),)
            if len(records.history) == 3
            else ()
        )


def test_a_norm_that_is_refused_leaves_in_force_what_it_would_have_replaced() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)

    within = Run(model := foreign(), muon(model))
    within.pilot = qkeel.autopilot(
        model, within.optimizer, policy=Asks(), every=1, batch=EXAMPLE
    )
    names = [name for name, _ in model.named_parameters()]
    within.train(0, 8)
    refused = [
        event["reason"] for event in within.pilot.events if event["event"] == "refused"
    ]
    assert len(refused) == 1
    assert "matrices only" in refused[0]
    assert [key[0] for key in within.pilot.remedies.handles] == ["qk_clip:threshold=20"]
    assert names == [name for name, _ in model.named_parameters()]
    other = Run(model := foreign(), muon(model))
    other.pilot = qkeel.autopilot(
        model, other.optimizer, policy=Once(), every=1, batch=EXAMPLE
    )
    assert other.train(0, 8).losses == within.losses  # that of the clip alone
    # With the optimizer of the vectors besides, the gains join that.
    model = foreign()
    vectors = adamw(nn.ParameterList([p for p in model.parameters() if p.ndim < 2]))
    pilot = qkeel.autopilot(
        model, [muon(model), vectors], policy=Asks(), every=1, batch=EXAMPLE
    )
    both = Run(model, pilot.optimizers[0], pilot)
    vectors.step()
    both.train(0, 8)
    assert any(
        p is model.get_parameter("q_norm.weight")
        for g in vectors.param_groups
        for p in g["params"]
    )


class Once(Asks):
    """The clip alone."""

    def decide(self, records: Records) -> tuple[Decision, ...]:
        return super().decide(records) if len(records.history) == 1 else ()


def test_a_calibrated_norm_is_announced_trained_kept_in_checkpoints_and_comes_off(
    tmp_path: Path,
) -> None:
    whole = run(policy=BOUNDLESS, batch=EXAMPLE)
    kept = len(whole.optimizer.param_groups[0]["params"])
    decision = next(d for d in whole.train(0, 6).pilot.decisions if d.action is NORM)
    assert (decision.step, decision.site, "under qk_clip" in decision.reason) == (
        4,
        None,
        True,
    )
    assert not whole.pilot.remedies.handles
    gains = {name: p for name, p in whole.model.named_parameters() if "norm" in name}
    assert set(gains) == {"q_norm.weight", "k_norm.weight"}
    assert {id(p) for p in gains.values()} <= {
        id(p) for p in whole.optimizer.param_groups[0]["params"]
    }
    start = {name: p.detach().clone() for name, p in gains.items()}
    whole.train(6, 9)
    assert not any(torch.equal(p, start[name]) for name, p in gains.items())
    file = tmp_path / "checkpoint"
    torch.save(
        [
            whole.model.state_dict(),
            whole.optimizer.state_dict(),
            whole.pilot.state_dict(),
        ],
        file,
    )
    model, optimizer, pilot = torch.load(file)
    again = run(foreign(1), policy=BOUNDLESS, batch=EXAMPLE)
    again.pilot.load_state_dict(pilot)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    assert again.train(9).losses == whole.train(9).losses[9:]
    assert equal(again.bits(), whole.bits())
    assert whole.pilot.events == again.pilot.events
    # How far a trained logit falls depends on the rounding of 24 steps at this rate. No arithmetic lets it pass the
    # bound of its gains: unit directions of length √d each, times the scale 1/√d.
    bound = 8**0.5 * float(
        (gains["q_norm.weight"] * gains["k_norm.weight"]).detach().abs().max()
    )
    assert largest_logit(whole.model.eval()) <= bound * (1 + 1e-5)
    for one in (whole, again):
        trained = one.bits()
        one.pilot.remove()
        assert not [name for name, _ in one.model.named_parameters() if "norm" in name]
        assert (
            len(one.optimizer.param_groups[0]["params"])
            == kept
            == len(one.optimizer.state)
        )
        own = one.bits()
        assert equal(
            own, {name: trained[name] for name in own}
        )  # as trained, not as they were when it came
        assert not any(left(one))


def largest_logit(model: nn.Module) -> float:
    """The largest |logit| that reaches torch's attention."""
    seen, theirs = [], F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(float((q @ k.mT).abs().max()) * q.shape[-1] ** -0.5)
        return theirs(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", spy)
        model(EXAMPLE)
    return max(seen)


def test_what_cannot_be_is_one_clear_sentence_and_nothing_is_applied() -> None:
    model = decoder()
    optimizer = adamw(model)
    for error, call in (
        (InvalidTypeError, lambda: qkeel.autopilot(model, None)),  # type: ignore[arg-type]
        (InvalidTypeError, lambda: qkeel.autopilot(model, [])),
        (UnknownNameError, lambda: qkeel.autopilot(model, optimizer, policy="lader")),
        (
            UnknownNameError,
            lambda: qkeel.autopilot(model, optimizer, policy="ladder:treshold=3"),
        ),
        (
            InvalidValueError,
            lambda: qkeel.autopilot(model, optimizer, policy="ladder:threshold=-3"),
        ),
        (InvalidTypeError, lambda: qkeel.autopilot(model, optimizer, policy=3)),  # type: ignore[arg-type]
    ):
        with pytest.raises(error):
            call()
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks
    pilot = run(foreign()).train(0, 8).pilot
    assert pilot.remedies.handles
    with pytest.raises(RefusedError, match="batch=batch"):
        run(foreign(1)).pilot.load_state_dict(pilot.state_dict())
    with pytest.raises(InvalidValueError, match="state_dict"):
        run().pilot.load_state_dict({})
