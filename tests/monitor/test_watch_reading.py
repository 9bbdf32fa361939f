"""What a monitor says is so: numbers against an oracle in float64, every pass counted once and where it belongs."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.attention import Attention, later, written
from tests.contract.watch.small import batch, hooks, small
from tests.training import adamw, sgd
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel import watch
from qkeel.errors import (
    AlreadyAppliedError,
    InvalidTypeError,
    InvalidValueError,
    QkeelWarning,
)
from qkeel.functional.statistics import TENSORS
from qkeel.monitor import Adaptive
from qkeel.monitor.token_classes import query_mask_of


def step(model, optimizer, *seeds):
    """One optimizer step over some micro-batches."""
    for seed in seeds:
        model(batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def setup(**options):
    model = small()
    optimizer = adamw(model, 0.01)
    return model, optimizer, watch(model, optimizer, **options)


def counts(stats):
    return [s.n_queries.tolist() for s in stats.values()]


def close(a, b):
    for field in TENSORS:
        assert_close(
            getattr(a, field).double(), getattr(b, field).double(), rtol=1e-5, atol=1e-6
        )


# --- what is counted where ------------------------------------------------------------------------------------------


def test_reads_in_the_middle_of_steps_lose_and_repeat_nothing():
    model, optimizer, monitor = setup()
    reads = []
    for seeds in ((0, 1), (2, 3), (4, 5)):
        for seed in seeds:
            model(batch(seed)).square().mean().backward()
            if seed in (0, 3):
                reads.append(monitor.read())
        optimizer.step()
        optimizer.zero_grad()
    reads.append(monitor.read())
    expected = [[10, 10]] * 2, [[30, 30]] * 2, [[20, 20]] * 2
    assert [counts(r) for r in reads] == [*expected]
    assert monitor.history.steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("every", "measured"),
    [
        (1, [0, 1, 2, 3, 4]),
        (3, [0, 3]),
        (Adaptive(least=3, most=9, change=1e-12), [0, 3]),
    ],
)
def test_without_an_optimizer_each_training_pass_is_a_step(every, measured):
    model = small()
    with watch(model, every=every) as monitor:
        for i in range(5):
            model(batch(i))
        assert monitor.history.steps.tolist() == measured


def test_passes_without_a_step_of_the_watched_optimizer_are_no_silent_end():
    """The script made another optimizer after `watch`."""
    model, optimizer, monitor = setup()
    other = sgd(model)
    del optimizer
    for i in range(3):
        model(batch(i)).sum().backward()
        other.step()
    with pytest.warns(
        QkeelWarning,
        match="the optimizer that is watched took no step, so nothing was recorded",
    ):
        monitor.close()
    assert not len(monitor.history)


def test_a_step_without_a_pass_warns_once_and_measures_again_when_one_comes():
    model, optimizer, monitor = setup()
    model.forward(batch(0)).sum().backward()
    with pytest.warns(
        QkeelWarning, match="no forward pass of the watched model was seen"
    ):
        optimizer.step()
    optimizer.step()
    step(model, optimizer, 0)
    assert monitor.history.steps.tolist() == [2]
    optimizer.step()
    assert monitor.history.steps.tolist() == [2]
    assert monitor.active


# --- padded batches -------------------------------------------------------------------------------------------------


class Padded(Attention):
    """One causal attention that hides padded keys."""

    def __init__(self):
        super().__init__()

    def forward(self, x, attention_mask=None):
        q, k, v = self.heads(x)
        seen = ~later(q, k)
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", ["name", "function", "tensor"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_count_nowhere(way, side, named):
    model, x = Padded().eval(), batch(3, b=3, t=6)
    lengths = torch.tensor([6, 4, 1])
    mask = torch.arange(6) < lengths[:, None]
    mask = (mask.flip(1) if side == "left" else mask).long()
    sources = {
        "name": "attention_mask",
        "function": lambda x, attention_mask=None: attention_mask,
        "tensor": mask,
    }
    with watch(model, query_mask=sources[way]) as monitor:
        model(x, attention_mask=mask) if named else model(x, mask)
        (stats,) = monitor.read().values()
    # As many sequences, each of its own length.
    with watch(model) as monitor:
        for row, n in zip(x, lengths):
            model(row[None, -n:] if side == "left" else row[None, :n])
        (alone,) = monitor.read().values()
    assert stats.n_queries.tolist() == [11, 11]
    assert stats.n_pairs.tolist() == [21 + 10 + 1] * 2
    close(stats, alone)


def test_a_mask_of_numbers_that_are_added_to_scores_is_refused():
    mask = torch.tensor([[0.0, 0.0, -1e9]])
    with pytest.raises(InvalidValueError, match="numbers below 0"):
        watch(Padded(), query_mask=mask)
    with pytest.raises(InvalidValueError, match="numbers below 0"):
        query_mask_of("mask", (), (), {"mask": mask})
    assert torch.equal(query_mask_of(mask >= 0, (), (), {}), mask == 0)


# --- bad arguments --------------------------------------------------------------------------------------------------

MODEL = small()
BAD = [
    (("model",), {}, InvalidTypeError, "torch.nn.Module"),
    ((MODEL, "adam"), {}, InvalidTypeError, "Optimizer"),
    (
        (MODEL, sgd(small(), lr=1e-3)),
        {},
        InvalidValueError,
        "any of the model's parameters",
    ),
    ((MODEL,), {"every": 0}, InvalidValueError, "at least 1"),
    ((MODEL,), {"every": True}, InvalidTypeError, "whole number"),
    ((MODEL,), {"sinks": 3}, InvalidTypeError, "sinks"),
    ((MODEL,), {"rules": ["ceiling"]}, InvalidTypeError, "rules"),
    ((MODEL,), {"query_mask": 3}, InvalidTypeError, "query_mask"),
    ((MODEL,), {"query_mask": "no such name"}, InvalidValueError, "no such name"),
    ((MODEL,), {"query_mask": torch.ones(3)}, InvalidValueError, "shape"),
    ((MODEL,), {"planned": 3}, InvalidTypeError, "PlannedRates"),
]


@pytest.mark.parametrize(("args", "options", "error", "words"), BAD)
def test_a_bad_argument_is_one_clear_error(args, options, error, words):
    with pytest.raises(error, match=words):
        watch(*args, **options)
    assert hooks(MODEL) == []


def test_a_model_is_watched_once():
    model = small()
    with watch(model):
        for same in (
            model,
            nn.DataParallel(model),
            torch.compile(model, backend="eager"),
        ):
            with pytest.raises(AlreadyAppliedError, match="already watched"):
                watch(same)
    watch(model).remove()


def test_a_model_without_attention_is_told_once_what_was_looked_for():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with watch(model) as monitor:
        with pytest.warns(QkeelWarning, match="scaled_dot_product_attention") as record:
            model(batch(0))
        assert len(record) == 1
        assert not monitor.active
        model(batch(0))
    assert hooks(model) == []


def test_a_pass_without_attention_among_others_is_no_fault():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = small()

        def forward(self, x, skip):
            return x if skip else self.body(x)

    model = Sometimes()
    optimizer = sgd(model)
    with watch(model, optimizer) as monitor:
        for skip in (False, True, False):
            model(batch(0), skip)
            monitor.read()
            optimizer.step()
        assert monitor.active
        assert monitor.history.steps.tolist() == [0, 2]


# --- the largest logits alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        small,
        lambda: Attention(written, groups=1),
        lambda: nn.Sequential(qkeel.nn.Attention(8, 4, 2)),
    ],
)
def test_the_maxima_alone_are_those_of_everything_and_nothing_else_is_recorded(
    make,
):
    model, found = make(), {}
    for stats in (True, "max"):
        with watch(model, stats=stats) as monitor:
            model(30 * batch(0))
            model(batch(1))
            table, tops = monitor.table(), monitor.history.series("max_logit")
            sample = monitor.sample
            found[stats] = (
                {name: x for name, x in sample.heads.items() if not np.isnan(x).all()},
                tops,
            )
        assert "max logit" in table
    assert {"max_logit", "entropy"} <= found[True][0].keys()
    alone = {*found["max"][0]} - {"non_finite", "finite_stages"}
    assert alone == {"max_logit", "logit_spread"}
    for name in alone:
        values = [found[stats][0][name] for stats in ("max", True)]
        assert_allclose(*values, rtol=1e-5, atol=1e-6)
    assert_allclose(found["max"][1], found[True][1], rtol=1e-5, atol=1e-6)
