"""All processes of a run decide alike and step alike; compiled models are what they were until the first action."""

import functools
import json

import numpy as np
import pytest
import torch
from tests.autopilot.processes import parallel
from tests.autopilot.runs import EAGER, RATE, STEPS, Run, adamw, equal, foreign
from tests.forked import spawn

import qkeel
from qkeel.autopilot import Action
from qkeel.monitor import PlannedRates


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_decide_alike_and_keep_equal_weights(tmp_path):
    spawn(2, functools.partial(parallel, tmp_path))
    first, second = (
        json.loads((tmp_path / f"decisions {rank}").read_text()) for rank in range(2)
    )
    assert first == second
    assert any("qk_clip" in text for text in first)
    assert equal(torch.load(tmp_path / "bits 0"), torch.load(tmp_path / "bits 1"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_compiled_training_is_itself_until_the_first_action():
    losses, pilot = [], None
    for is_piloted in (False, True):
        torch._dynamo.reset()
        model = foreign()
        call, optimizer = torch.compile(model, backend="aot_eager"), adamw(model)
        if is_piloted:
            planned = PlannedRates.of([RATE] * STEPS)
            pilot = qkeel.autopilot(
                call, optimizer, policy=EAGER, every=2, planned=planned
            )
        losses.append(Run(model, optimizer).train(call=call).losses)
    first = next(d.step for d in pilot.decisions if d.action is not Action.WATCH)
    assert losses[0][: first + 3] == losses[1][: first + 3]
    assert losses[0] != losses[1]
    assert np.nanmax(pilot.monitor.history.heads["max_logit"][-1]) < 60
