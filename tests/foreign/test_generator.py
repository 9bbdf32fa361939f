"""A sample of random attentions is right or reported, and the questions find what is planted."""

import dataclasses
import functools

import pytest
from tests.quick import one_in
from tools.foreign.checks import judged, overall
from tools.foreign.generator import (
    CHOICES,
    Plan,
    _truth,
    judge,
    subject,
)

OFTEN = ("sites", "heads", "statistics", "rows")
PLAIN = Plan(**{part: values[0] for part, values in CHOICES.items()})
# Heads are mixed, what is added is no product, a key has no rows of heads, or the idiom is not followed: said so.
TOLD = {
    "mix": {"linear", "einsum", "residual", "convolution"},
    "second": {"keys alone"},
    "product": {"outer"},
    "mask": {"write"},
}


@pytest.mark.parametrize("part", one_in(CHOICES, 2))
def test_an_attention_with_one_choice_that_is_not_plain_is_right(part):
    said = {}
    for choice in CHOICES[part][1:]:
        changes = {part: choice} | ({"groups": "2 tiled"} if part == "layout" else {})
        said[choice] = overall(
            judged(subject(dataclasses.replace(PLAIN, **changes)), OFTEN).found
        )
    assert said == {
        choice: "reported" if choice in TOLD.get(part, ()) else "right"
        for choice in CHOICES[part][1:]
    }


def test_random_attention_is_right_or_reported():
    found = {seed: judge(seed, OFTEN) for seed in range(8)}
    assert not {
        f"{seed}: {Plan.drawn(seed)}": f
        for seed, all_ in found.items()
        for f in all_
        if f.verdict == "wrong"
    }
    assert sum(overall(all_) == "right" for all_ in found.values()) > 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1080, 20))
def test_more_random_attention_is_right_or_reported_whatever_is_asked(
    first,
):
    seeds = range(first, first + 20)
    assert not {
        f"{seed}: {Plan.drawn(seed)}": f
        for seed in seeds
        for f in judge(seed)
        if f.verdict == "wrong"
    }


def test_the_plainest_attention_is_right_in_all():
    found = judged(subject(PLAIN))
    assert found.attentions == ["right"]
    assert overall(found.found) == "right", found


def _with(change, model, example):
    (call,) = _truth(model, example)
    if change == "an attention more":
        return [call, dataclasses.replace(call, module="other")]
    if change == "other heads":
        return [
            dataclasses.replace(
                call, z=call.z.roll(1, 1), capped=call.capped.roll(1, 1)
            )
        ]
    if change == "fewer heads":
        return [
            dataclasses.replace(
                call,
                z=call.z[:, :2],
                capped=call.capped[:, :2],
                visible=call.visible[:, :2],
            )
        ]
    return [
        dataclasses.replace(
            call,
            z=call.z + example[0][0].mean(),
            capped=call.capped + example[0][0].mean(),
        )
    ]


@pytest.mark.parametrize(
    ("change", "questions"),
    [
        ("an attention more", {"sites"}),
        ("other heads", {"statistics", "rows"}),
        ("fewer heads", {"heads", "statistics"}),
        ("something of the input", {"statistics", "rows"}),
    ],
)
def test_what_is_planted_is_found(change, questions):
    planted = dataclasses.replace(
        subject(PLAIN), truth=functools.partial(_with, change)
    )
    found = judged(planted, OFTEN)
    assert {f.question for f in found.found if f.verdict == "wrong"} == questions
    assert "wrong" in found.attentions
