"""The policy: a pure function of records, equal live and in a replay; what the ladder does when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkeel.autopilot import (
    Action,
    Decision,
    Ladder,
    Records,
    Refused,
    SiteFacts,
    active_actions,
)
from qkeel.monitor.recording import Recording

SITES = (SiteFacts(name="a", n_heads=2), SiteFacts(name="b", n_heads=2))
WIDE = Ladder(calm=4, allow_new_parameters=True)


def decided(
    logits: Any,
    chosen: Any = WIDE,
    *,
    sites: Any = SITES,
    refused: Any = (),
    entropy: Any = None,
    lr: Any = None,
) -> list[Decision]:
    """The decisions on logits [n layers heads], a record a step."""
    recording, decisions = Recording([s.name for s in sites]), list[Decision]()
    for step, record in enumerate(logits):
        heads = {"max_logit": np.asarray(record, dtype=float)}
        if entropy is not None:
            heads["entropy"] = np.asarray(entropy[step], dtype=float)
        recording.append({"step": step, "lr": 0.1 if lr is None else lr[step]}, heads)
        records = Records(
            history=recording.history,
            sites=sites,
            decisions=tuple(decisions),
            refused=tuple(refused),
        )
        decisions += chosen.decide(records)
    return decisions


def grown(n: int, power: float, top: float = 30.0) -> np.ndarray:
    """[n 2 2]: head 1 of layer b grows, the others do not."""
    logits = np.full((n, 2, 2), 3.0)
    logits[:, 1, 1] = 1.0 + top * np.arange(n) ** power
    return logits


def clip(step: int, *heads: int, release: bool = False) -> Decision:
    about = {"rule": "", "reason": "", "remedy": "qk_clip"}
    return Decision(
        step=step, action=Action.CLIP, site="a", heads=heads, release=release, **about
    )  # type: ignore[arg-type]


def test_an_action_on_all_heads_stays_on_all_heads_whatever_is_added() -> None:
    def heads(*decisions: Decision) -> tuple[int, ...] | None:
        return active_actions(decisions).get((Action.CLIP, "a"), (None, None))[1]

    assert heads(clip(1, 0), clip(2, 1)) == (0, 1)
    assert heads(clip(1, 0), clip(2)) == ()
    assert heads(clip(1), clip(2, 1)) == ()
    assert heads(clip(1, 0, 1), clip(2, 1, release=True)) == (0,)
    assert heads(clip(1), clip(2, release=True)) is None


LINEAR = Refused(
    step=-1, action="lalr", site=None, reason="its steps are not linear in the rate"
)
NO_CLIP = Refused(step=-1, action="qk_clip", site=None, reason="no")


def acts(
    found: list[Decision],
) -> list[tuple[Action, str | None, tuple[int, ...], bool]]:
    return [(d.action, d.site, d.heads, d.release) for d in found]


def test_it_clips_the_heads_that_rise_with_matched_steps_and_keeps_that_clip() -> None:
    pushed, calm = grown(12, 1.0), np.full((90, 2, 2), 3.0)
    pushed[4:, 1, 1] = 29.0  # held by the clip
    found = decided(np.concatenate([pushed, calm]))
    assert acts(found) == [
        (Action.WATCH, None, (), False),
        (Action.CLIP, "b", (1,), False),
    ]
    assert found[1].remedy == "qk_clip:threshold=15,steps=matched"
    assert found[1].forecast is None or found[1].forecast.threshold in (100, 1000)


@pytest.mark.parametrize(
    ("refused", "action", "heads", "remedy"),
    [
        (LINEAR, Action.CLIP, (1,), "qk_clip:threshold=15"),
        (NO_CLIP, Action.RATES, (), "lalr:tau=0.1"),
    ],
    ids=["steps that cannot be scaled", "weights that cannot be clipped"],
)
def test_a_clip_with_full_steps_and_lalr_are_released_with_hysteresis(
    refused: Refused, action: Action, heads: tuple[int, ...], remedy: str
) -> None:
    pushed, calm = grown(12, 1.0), np.full((90, 2, 2), 3.0)
    pushed[4:, 1, 1] = 29.0
    found = decided(np.concatenate([pushed, calm]), refused=[refused])
    assert acts(found)[1:] == [
        (action, "b", heads, False),
        (action, "b", heads, True),
        (Action.WATCH, None, (), True),
    ]
    assert found[1].remedy == found[2].remedy == remedy
    assert not active_actions(found)
    # The same again takes twice as long to be released.
    twice = decided(np.concatenate([pushed, calm, pushed, calm]), refused=[refused])
    waits = [
        b.step - max(d.step for d in twice if d.step < b.step)
        for b in twice
        if b.release and b.action is action
    ]
    assert len(waits) == 2
    assert waits[1] > waits[0]


def test_healthy_logits_raise_nothing_but_a_closer_look() -> None:
    flat = decided(3 + np.random.default_rng(0).random((60, 2, 2)))
    assert [(d.action, d.release) for d in flat] == [
        (Action.WATCH, False),
        (Action.WATCH, True),
    ]
    lr = 0.1 * np.linspace(1, 0, 200)
    calm = 3 + 12 * np.tanh(np.arange(200) / 60)[:, None, None] * np.ones((1, 2, 2))
    assert {d.action for d in decided(calm, lr=lr)} <= {Action.WATCH}


def test_it_never_acts_where_the_weights_are_not_confirmed() -> None:
    unknown = (SITES[0], SiteFacts(name="b", n_heads=2, unknown="not confirmed"))
    assert not [d for d in decided(grown(30, 1.5), sites=unknown) if d.site == "b"]


def test_what_is_refused_gives_way_to_the_next_action_and_the_end_is_said_once() -> (
    None
):
    logits = grown(40, 1.5)

    def first(*actions: Action, chosen: Any = WIDE) -> list[Action]:
        refused = [
            Refused(step=-1, action=str(a), site=None, reason="no") for a in actions
        ]
        return [
            d.action
            for d in decided(logits, chosen, refused=refused)
            if d.action is not Action.WATCH
        ]

    assert first(Action.CLIP)[0] is Action.RATES
    assert first(Action.CLIP, Action.RATES) == [Action.NORM]
    assert first(Action.CLIP, Action.RATES, Action.NORM) == [Action.NONE]
    assert first(Action.CLIP, Action.RATES, chosen=Ladder()) == [
        Action.NONE
    ]  # no parameters are added unasked
    assert first()[:2] == [
        Action.CLIP,
        Action.NORM,
    ]  # a logit that grows in spite of the clip; lalr would undo it


def test_a_norm_takes_the_place_of_all_others() -> None:
    logits = grown(40, 1.0)
    logits[8:, 1, 1] = 900.0  # the clip does not limit it
    found = decided(logits)
    norm = next(i for i, d in enumerate(found) if d.action is Action.NORM)
    assert list(active_actions(found[: norm + 1])) == [
        (Action.WATCH, None),
        (Action.NORM, None),
    ]
    assert found[norm].site is None
    assert len(found) == norm + 1


def test_low_entropy_under_a_clip_asks_for_more() -> None:
    entropy = np.full((30, 2, 2), 2.0)
    entropy[6:, 0] = 0.01
    found = decided(np.full((30, 2, 2), 3.0), entropy=entropy)
    clip, norm = (d for d in found if d.action is not Action.WATCH)
    assert (clip.action, clip.site, clip.heads) == (Action.CLIP, "a", (0, 1))
    assert (norm.action, norm.reason) == (
        Action.NORM,
        "its mean attention entropy is 0.01 nats",
    )
