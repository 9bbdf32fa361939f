"""apply: names, composition, order, handles, bad input. Whatever is refused leaves the model as it was."""

import itertools
import math

import pytest
import torch
from tests.each_row import each_row
from tests.quick import quick
from tests.training import adamw
from torch import nn

import qkeel
from qkeel.errors import (
    AlreadyAppliedError,
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    UnknownNameError,
)
from qkeel.remedies import REMEDIES, canonical, note, parse
from qkeel.remedies.base import NoRemedy
from qkeel.remedies.lalr import LALR

from .models import assert_same, decoder, snapshot, tokens, train

NORMS = ("qk_norm", "qkv_norm", "key_norm", "query_norm", "cosine")
# Pairs that make no sense together, whichever comes first.
CONFLICTS = {
    frozenset(pair)
    for pair in (
        *itertools.product(NORMS, ("lalr", "qk_clip", "spectral_cap")),
        *itertools.combinations(NORMS, 2),
        *itertools.combinations(("sigmoid", "softpick", "sink"), 2),
        ("log_n", "attention_temperature"),
        *itertools.product(
            ("sigma_reparam",), ("lalr", "qk_clip", "spectral_cap", "frozen_qk")
        ),
        ("swin_norm", "peri_norm"),
        ("swin_norm", "qkv_norm"),
    )
}

# One remedy of each mechanism; the slots of a spec compose in test_calls.
MECHANISMS = (
    *("qk_norm", "softcap", "lalr", "qk_clip"),
    *("qk_weight_decay", "sigma_reparam", "output_gate", "peri_norm", "final_softcap"),
)


def apply(*args, **options):
    """With what some formulas need."""
    return qkeel.apply(*args, **{"train_length": 16, **options})


@pytest.mark.parametrize("name", sorted({name for pair in CONFLICTS for name in pair}))
def test_a_conflict_is_refused_whichever_comes_first_and_changes_nothing(
    name,
):
    model = decoder()
    optimizer = adamw(model)
    before, out = snapshot(model, optimizer), model(tokens())
    for other in sorted(
        next(iter(pair - {name})) for pair in CONFLICTS if name in pair
    ):
        # Both spellings are one: a pair is written in one of its orders, and given as a list in the other.
        named = f"{name}+{other}" if name < other else [name, other]
        with pytest.raises(RefusedError, match=rf"{other} at blocks.0.attention"):
            apply(model, named, optimizer)
        assert_same(before, snapshot(model, optimizer))
        with apply(model, name, optimizer), pytest.raises(RefusedError):
            apply(model, other, optimizer)
    assert_same(before, snapshot(model, optimizer))
    assert torch.equal(out, model(tokens()))


PAIRS = [
    pair
    for pair in itertools.combinations(REMEDIES, 2)
    if frozenset(pair) not in CONFLICTS
]


@pytest.mark.parametrize(
    ("one", "other"), quick(PAIRS, lambda pair: {*pair} <= {*MECHANISMS})
)
def test_two_remedies_compose_in_both_orders(one, other):
    model = decoder()
    optimizer = adamw(model)
    before = snapshot(model, optimizer)
    for pair in ((one, other), (other, one)):
        # One after the other, taken off in the order they came, not the reverse.
        first, second = (apply(model, name, optimizer) for name in pair)
        first.remove()
        second.remove()
        assert_same(before, snapshot(model, optimizer))
    for pair in ((one, other), (other, one)):
        with apply(model, "+".join(pair), optimizer):
            train(model, optimizer, 1)
        assert snapshot(model, optimizer)["hooks"] == before["hooks"]


def test_a_part_of_a_model_can_be_treated_alone():
    model = decoder()
    with apply(model.blocks[1], "qk_norm"):
        names = [n for n, _ in model.named_parameters() if n.endswith("q_norm")]
        assert names == ["blocks.1.attention.q_norm"]
        with pytest.raises(
            AlreadyAppliedError,
            match=r"qk_norm is already applied to blocks\.1\.attention",
        ):
            apply(model, "qk_norm")
    apply(model, "qk_norm")


# --- names


def test_names_lists_and_objects_say_the_same():
    assert (
        parse("lalr:tau=0.3+softcap")
        == parse(["lalr:tau=0.3", "softcap"])
        == parse([LALR(tau=0.3), "softcap"])
    )
    assert (
        parse("lalr", tau=0.3)
        == parse(LALR(tau=0.3))
        == parse("quack:tau=0.3")
        == parse("lalr: tau=0.3")
    )
    assert parse([]) == ()


def test_canonical_spelling_and_notes():
    assert canonical("quack:tau=1e-1") == "lalr:tau=0.1"
    assert note("quack+lalr").line == f"{LALR.line}; {LALR.line}"
    assert note("quack+lalr").source == LALR.source
    for name, cls in REMEDIES.items():
        assert cls.name == name
        assert qkeel.remedies()[name] == f"{cls.line} [{cls.source}]"
        assert hash(cls()) == hash(cls())


@each_row(
    "named, options, error",
    [
        ("", {}, InvalidValueError),
        ("lalr+", {}, InvalidValueError),
        ("lalr:tau=x", {}, InvalidTypeError),
        ("lalr:tau=true", {}, InvalidTypeError),
        ("qk_lr:factor=-1", {}, InvalidValueError),
        ("qk_lr:factor=inf", {}, InvalidValueError),
        *(("lalr", {"tau": x}, InvalidValueError) for x in (0, -0.1, math.nan)),
        ("spectral_cap:cap=0", {}, InvalidValueError),
        ("cosine:length=2.5", {}, InvalidTypeError),
        ("dropout:rate=1", {}, InvalidValueError),
        ("qk_clip:frozen=scales", {}, UnknownNameError),
        ("qk_norm:gain=dims", {}, UnknownNameError),
        ("qkv_norm:drop_pre_norm=maybe", {}, InvalidTypeError),
        ("lalr+softcap", {"tau": 0.1}, InvalidTypeError),
        (3, {}, InvalidTypeError),
        (["lalr", 3], {}, InvalidTypeError),
        (["lalr"], {"tau": 0.1}, InvalidTypeError),
        (NoRemedy(), {"tau": 0.1}, InvalidTypeError),
    ],
)
def test_a_wrong_name_or_option_is_one_clear_error(named, options, error):
    model = decoder()
    before = snapshot(model)
    with pytest.raises(error):
        apply(model, named, None, **options)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("name", ["lalr", "qk_lr", "qk_clip", "qk_weight_decay"])
def test_what_acts_on_steps_asks_for_the_optimizer(name):
    model = decoder()
    before = snapshot(model)
    with pytest.raises(
        RefusedError,
        match=rf"{name} acts on optimizer steps: call qkeel.apply\(model, '{name}'",
    ):
        apply(model, f"softcap+{name}")
    assert_same(before, snapshot(model))


def test_the_wrong_kind_of_argument_is_one_clear_error():
    model = decoder()
    with pytest.raises(
        InvalidTypeError,
        match=r"expected a torch.nn.Module to apply remedies to, got int",
    ):
        apply(3, "lalr")
    with pytest.raises(
        InvalidTypeError,
        match=r"expected a torch.optim.Optimizer or a list of them, got StepLR",
    ):
        apply(model, "lalr", torch.optim.lr_scheduler.StepLR(adamw(model), 1))
    with pytest.raises(RefusedError, match="found no attention in this Linear"):
        apply(nn.Linear(2, 2), "lalr", None)


def test_weights_without_values_are_refused():
    model = decoder().to("meta")
    with pytest.raises(
        RefusedError, match="on the meta device; give it values before lalr is applied"
    ):
        apply(model, "lalr", adamw(model))
