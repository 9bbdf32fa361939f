"""The policy: a pure function of records; what the ladder does when."""

import dataclasses

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
from qkeel.monitor.history import Recording

WATCH, CLIP, RATES, NONE = Action
SITES = (SiteFacts(name="a", n_heads=2), SiteFacts(name="b", n_heads=2))
CALM = Ladder(calm=4)
MATCHED = "qk_clip:threshold=15,steps=matched"


def refuses(*actions):
    return [Refused(step=-1, action=str(a), site=None, reason="no") for a in actions]


def decided(
    logits,
    ladder=CALM,
    *,
    sites=SITES,
    refused=(),
    entropy=None,
    capped=None,
    spread=None,
    lr=None,
):
    """The decisions on logits [n layers heads], a record a step."""
    recording, decisions = Recording([s.name for s in sites]), list[Decision]()
    for step, record in enumerate(logits):
        heads = {"max_logit": np.asarray(record, dtype=float)}
        for name, series in (
            ("entropy", entropy),
            ("capped_max_logit", capped),
            ("logit_spread", spread),
        ):
            if series is not None:
                heads[name] = np.asarray(series[step], dtype=float)
        rate = 0.1 if lr is None else lr[step]
        recording.append({"step": step, "lr": rate}, heads)
        records = Records(
            history=recording.history,
            sites=sites,
            decisions=tuple(decisions),
            refused=tuple(refused),
        )
        decisions += ladder.decide(records)
    return decisions


def grown(n, power=1.5):
    """[n 2 2]: head 1 of layer b grows, the others do not."""
    logits = np.full((n, 2, 2), 3.0)
    logits[:, 1, 1] = 1.0 + 30.0 * np.arange(n) ** power
    return logits


def clip(step, *heads):
    about = {"rule": "", "reason": "", "remedy": "qk_clip"}
    return Decision(step=step, action=CLIP, site="a", heads=heads, **about)


@pytest.mark.parametrize(
    ("decisions", "heads"),
    [
        ([clip(1, 0), clip(2, 1)], (0, 1)),
        ([clip(1, 0), clip(2)], ()),
        ([clip(1), clip(2, 1)], ()),
    ],
)
def test_an_action_on_all_heads_stays_on_all_heads_whatever_is_added(decisions, heads):
    assert active_actions(decisions) == {(CLIP, "a"): ("qk_clip", heads)}
    assert Decision.of(decisions[0].row()) == decisions[0]


def test_a_decision_is_read_again_with_its_forecast():
    *_, end = decided(grown(12))
    assert end.forecast is not None
    assert Decision.of(end.row()) == end
    # Once, also where the reason says it.
    for reason in ("it grows", str(end.forecast)):
        assert (
            str(dataclasses.replace(end, reason=reason)).count(str(end.forecast)) == 1
        )


def test_a_decision_that_its_site_refused_when_it_came_has_no_effect():
    refused = [Refused(step=2, action="qk_clip", site="a", reason="no")]
    assert active_actions([clip(1, 0), clip(2, 1)], refused)[CLIP, "a"][1] == (0,)


@pytest.mark.parametrize(
    ("refused", "action", "heads", "remedy"),
    [
        ([], CLIP, (1,), MATCHED),
        (refuses(RATES), CLIP, (1,), "qk_clip:threshold=15"),  # unmatched steps
        (refuses(CLIP), RATES, (), "lalr:tau=0.1"),
    ],
)
def test_it_acts_on_the_heads_that_rise_and_keeps_the_remedy(
    refused, action, heads, remedy
):
    pushed, calm = grown(12, 1.0), np.full((90, 2, 2), 3.0)
    pushed[4:, 1, 1] = 29.0  # held by the remedy
    watch, act = decided(np.concatenate([pushed, calm]), refused=refused)
    assert (watch.action, watch.step, watch.remedy) == (WATCH, 0, "watch:every=2")
    assert "watch closer" in str(dataclasses.replace(watch, remedy=""))
    assert (act.action, act.site, act.heads, act.remedy) == (action, "b", heads, remedy)
    assert act.step == 1
    assert (act.forecast is None) or act.forecast.threshold in (100, 1000)


def test_logits_are_judged_as_they_enter_the_softmax():
    logits = grown(30)
    assert {d.action for d in decided(logits, capped=20 * np.tanh(logits / 200))} == {
        WATCH
    }


@pytest.mark.parametrize(
    ("largest", "action"),
    [
        ((3.0, 60.0), CLIP),
        ((3.0, 120.0), CLIP),  # what keys have in common shrinks with the weights
        ((3.0, 5000.0), RATES),  # a clip to 15 would leave a spread of 0.1
        ((-500.0, -500.0), RATES),  # a clip would not act
        ((-500.0, 60.0), CLIP),
    ],
)
def test_no_clip_where_a_constant_decides_on_the_largest_logit(largest, action):
    spread = np.full((6, 2, 2), 3.0)
    spread[1:, 1] = 40.0
    spread[:, 0, 1] = np.nan  # a head that was not measured
    logits = np.full((6, 2, 2), 3.0)
    logits[1:, 1] = largest
    _, act = decided(logits, spread=spread)[:2]
    assert (act.action, act.site) == (action, "b")
    assert "spread 40;" in act.reason


def test_heads_over_the_threshold_join_a_clip():
    logits = grown(12, 1.0)
    logits[4:, 1, 1] = 29.0
    logits[8:, 1, 0] = 16.0  # over the threshold of 15, and not rising
    _, first, second = decided(logits)
    assert (first.heads, second.heads, second.step) == ((1,), (0,), 8)
    assert active_actions([first, second])[CLIP, "b"] == (MATCHED, (0, 1))


def test_healthy_logits_raise_nothing_but_a_closer_look():
    flat = decided(3 + np.random.default_rng(0).random((60, 2, 2)))
    assert [(d.action, d.release, d.step) for d in flat] == [
        (WATCH, False, 0),
        (WATCH, True, 4),  # after `calm` records
    ]
    lr = 0.1 * np.linspace(1, 0, 200)
    calm = 3 + 12 * np.tanh(np.arange(200) / 60)[:, None, None] * np.ones((1, 2, 2))
    assert {d.action for d in decided(calm, lr=lr)} <= {WATCH}


def test_records_without_logits_decide_nothing():
    recording = Recording([site.name for site in SITES])
    records = Records(history=recording.history, sites=SITES)
    assert CALM.decide(records) == ()
    recording.append({"step": 0, "lr": 0.1}, {"entropy": np.ones((2, 2))})
    assert CALM.decide(Records(history=recording.history, sites=SITES)) == ()


def test_it_never_acts_where_the_weights_are_not_confirmed():
    unknown = (SITES[0], SiteFacts(name="b", n_heads=2, unknown="not confirmed"))
    assert not [d for d in decided(grown(30), sites=unknown) if d.site == "b"]


@pytest.mark.parametrize(
    ("refused", "actions"),
    [
        # A logit that grows in spite of the clip; lalr would undo it.
        ([], [CLIP, NONE]),
        ([CLIP], [RATES, NONE]),
        ([CLIP, RATES], [NONE]),
    ],
)
def test_what_is_refused_gives_way_to_the_next_action_and_the_end_is_said_once(
    refused, actions
):
    found = decided(grown(40), refused=refuses(*refused))
    assert [d.action for d in found if d.action is not WATCH] == actions
    assert found[-1].site == "b"
    assert all(
        f"{action}: no" in found[-1].reason for action in refused if len(refused) > 1
    )


def test_a_logit_far_over_the_threshold_under_a_clip_is_said():
    logits = grown(40, 1.0)
    logits[4:, 1, 1] = 46.0  # the clip does not limit it
    watch, act, end = decided(logits)
    assert (watch.action, act.action, end.action) == (WATCH, CLIP, NONE)
    # 2 · patience records after the clip.
    assert end.step == act.step + 6
    logits[4:, 1, 1] = 45.0  # three times the threshold of 15
    assert [d.action for d in decided(logits)] == [WATCH, CLIP]


def test_low_entropy_under_a_clip_is_said():
    entropy = np.full((30, 2, 2), 2.0)
    entropy[6:, 0] = 0.01
    found = decided(np.full((30, 2, 2), 3.0), entropy=entropy)
    clipped, end = (d for d in found if d.action is not WATCH)
    assert (clipped.action, clipped.site, clipped.heads) == (CLIP, "a", (0, 1))
    assert (end.action, end.step) == (NONE, clipped.step + 6)


def test_a_closer_watch_ends_after_twenty_calm_records():
    decisions = decided(np.full((40, 2, 2), 3.0), Ladder())
    assert [(d.step, d.action, d.release) for d in decisions] == [
        (0, WATCH, False),
        (20, WATCH, True),
    ]
