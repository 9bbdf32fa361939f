"""Cadences, and how an adaptive one follows the largest logit."""

import pytest
import torch
from tests.monitor.test_changes import Attention
from tests.training import sgd

import qkeel
from qkeel.monitor import Adaptive, Every, LogSpaced
from qkeel.monitor.cadence import cadence


def measured(jump, steps, every):
    """The measured steps of a run whose logits grow 25-fold at one step and stay as they are otherwise."""
    torch.manual_seed(0)
    model = Attention()
    optimizer = sgd(model, 0.0)
    x = 4 * torch.randn(2, 8, 16)
    with qkeel.watch(model, optimizer, every=every) as monitor:
        for step in range(steps):
            if step == jump:
                with torch.no_grad():
                    model.qkv.weight[:32] *= 5
            model(x).sum().backward()
            optimizer.step()
        monitor.remove()  # which does not measure the end
        return [int(step) for step in monitor.history.steps]


def test_after_a_jump_intervals_are_short_again():
    assert measured(12, 34, Adaptive(least=3, most=20)) == [0, 3, 9, 21, 24, 30]


@pytest.mark.parametrize(
    ("tops", "due"),
    [
        ([], 8),  # nothing is known, as on several processes
        ([5.0], 2),
        ([5.0, 5.4], 4),
        ([5.0, 5.6], 2),
        ([5.0, 5.4, 5.0, 4.7], 8),
        ([50.0, 5.0, 5.0], 4),
        ([0.1, 0.9], 4),  # under a nat, logits make no difference to a softmax
        ([5.0, -5.0], 2),
    ],
)
def test_the_interval_follows_the_changes_of_the_largest_logit(tops, due):
    every = Adaptive(least=2, most=8)
    assert next(step for step in range(1, 20) if every.due(step, 0, tops)) == due


def test_a_cadence_is_a_number_or_an_object_and_says_so_otherwise():
    assert cadence(7) == Every(7)
    assert cadence(LogSpaced(per_decade=3)) == LogSpaced(per_decade=3)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="at least 1 step"):
            cadence(bad)
    for kind in (True, 2.0, "10"):
        with pytest.raises(TypeError, match="whole number"):
            cadence(kind)
    with pytest.raises(ValueError, match="least <= most"):
        Adaptive(least=9, most=3)
    with pytest.raises(ValueError, match="above 0"):
        Adaptive(change=0.0)
    with pytest.raises(ValueError, match="per decade"):
        LogSpaced(per_decade=0)
