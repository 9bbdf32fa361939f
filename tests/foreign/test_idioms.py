"""Attention in any idiom is right or reported, what looks alike is not, and the idioms compute what they say."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from tests.quick import quick
from tools.foreign import idioms
from tools.foreign.checks import overall
from tools.foreign.idioms import (
    COMBINING,
    HEADS,
    LOOKS_ALIKE,
    NORMAL,
    OFTEN,
    ORDERS,
    SCORING,
    SIZE,
    SPECIAL,
    TWO_SIDED,
    Idiom,
    Inputs,
    Plan,
    Whole,
    called_attention,
    judge,
    silent,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
SILENT = "neither a site nor missed"


def _sides(scoring: str, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of an idiom as it makes them, put in order, and by their plain definition."""
    torch.manual_seed(0)
    attention = Idiom(Plan(scoring=scoring)).double()
    x = torch.randn(2, 5, idioms.WIDTH, dtype=torch.float64)
    q, k = (
        m(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).detach()
        for m in (attention.q, attention.k)
    )
    own = {
        n: p.detach()[:, :5] if n == "asks" else p.detach()
        for n, p in attention.own.items()
    }
    score, exact, _ = SCORING[scoring]
    made = score(Inputs(x=x, q=q, k=k, own=own, order=order))
    plain = exact(Inputs(x=x, q=q, k=k, own=own, order="bhts"))
    return made.permute([order.index(letter) for letter in "bhts"]).expand_as(
        plain
    ), plain


@pytest.mark.parametrize("scoring", SCORING)
def test_scores_are_those_of_their_plain_definition_in_every_order(
    scoring: str,
) -> None:
    for order in ORDERS:
        torch.testing.assert_close(*_sides(scoring, order), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("normal", NORMAL)
def test_weights_are_those_of_their_plain_definition_over_any_dimension(
    normal: str,
) -> None:
    torch.manual_seed(0)
    z, seen = (
        torch.randn(2, HEADS, 5, 5, dtype=torch.float64),
        torch.ones(5, 5, dtype=torch.bool).tril()[None, None],
    )
    weigh, exact = NORMAL[normal]
    torch.testing.assert_close(
        weigh(z, seen, 3), exact(z, seen.expand_as(z)), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(
        weigh(z.mT, seen.mT, 2).mT, exact(z, seen.expand_as(z)), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("order", ORDERS)
def test_values_are_combined_alike_in_every_way(order: str) -> None:
    torch.manual_seed(0)
    w, v = torch.rand(2, HEADS, 5, 5), torch.randn(2, HEADS, 5, SIZE)
    turned = w.permute(["bhts".index(letter) for letter in order])
    others = {"two hops", "gathered", "renormalized"}
    for name in COMBINING.keys() - others:
        torch.testing.assert_close(
            COMBINING[name](turned, v, order), w @ v, atol=1e-5, rtol=1e-5
        )


def test_there_are_more_than_eighty_idioms_and_most_parts_are_plain() -> None:
    drawn = [Plan.drawn(seed) for seed in range(500)]
    assert len({(p.scoring, p.normal, p.combining) for p in drawn}) >= 80
    for part, table in (
        ("scoring", SCORING),
        ("normal", {**NORMAL, **TWO_SIDED}),
        ("combining", COMBINING),
    ):
        assert {getattr(p, part) for p in drawn} == set(table)


def test_the_entropy_of_weights_beside_a_null_key_counts_the_null_key() -> None:
    found = judge(
        Plan(normal="null key", combining="at edges", order="hbts"), questions=OFTEN
    )
    assert overall(found) == "right", found


PLANS = [
    *(Plan(scoring=name) for name in ("product and sum", "cosine", "additive")),
    *(Plan(normal=name) for name in ("exp2", "sigmoid")),
    Plan(normal="exponentials times mask", order="bhst", causal=True),
    Plan(scoring="columns", order="btsh"),
    Plan(scoring="pointer", normal="sparsemax", order="btsh", causal=True),
]


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda p: f"{p.scoring} {p.normal} {p.combining} {p.order}"
)
def test_what_no_reader_follows_is_reported(plan: Plan) -> None:
    found = judge(plan, questions=OFTEN)
    assert overall(found) == "reported", found
    assert not any(f.said == SILENT for f in found)


ATTENTIONS = (
    "nearest first",
    "windows",
    "online",
    "slots",
    "covariance",
    "differential",
)
OTHERS = {
    "router",
    "top experts",
    "written",
    "scalar gates",
    "gated convolution",
    "streams",
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_of_a_shape_of_its_own_is_a_site_or_reported(name: str) -> None:
    torch.manual_seed(0)
    assert silent(Whole(SPECIAL[name])) == ""


@pytest.mark.parametrize("name", quick(LOOKS_ALIKE, OTHERS.__contains__))
def test_what_looks_alike_is_not_called_attention(name: str) -> None:
    torch.manual_seed(0)
    assert called_attention(Whole(LOOKS_ALIKE[name])) == ""


def test_a_report_names_the_module_and_what_made_the_weights() -> None:
    torch.manual_seed(0)
    s = idioms.idiom(Plan(scoring="additive"))
    (missed,) = idioms.qkeel.find_sites(s.model, s.example[0]).missed
    assert missed.module == "odd"
    assert re.search(
        "values of several positions are weighted by a softmax", missed.reason
    )
    assert dataclasses.replace(missed).operation == "softmax"
