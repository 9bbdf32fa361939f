"""The remedy `autopilot` in runs of the lab: recorded, resumed to the same bits, and refused where it cannot be."""

import dataclasses

import pytest

from qkeel.errors import InvalidValueError, UnknownNameError
from qkeel.lab import run
from qkeel.lab.build_run import canonical
from qkeel.lab.config import RunConfig
from qkeel.lab.run_record import Watcher

BASE = RunConfig(
    steps=16,
    eval_sequences=1,
    probe_sequences=1,
    log_every=2,
    checkpoint_every=0,
    device="cpu",
)
CONFIG = dataclasses.replace(
    BASE,
    remedy="autopilot:threshold=2,patience=1",
    optim=dataclasses.replace(BASE.optim, lr=0.3),
    dtype="fp32",
)


@pytest.mark.slow
def test_a_run_with_an_autopilot_is_recorded_and_resumes_to_the_same_bits(
    tmp_path,
):
    whole = run(CONFIG, tmp_path / "whole")
    steps = []
    stop = Watcher(
        on_record=lambda record: steps.append(int(str(record["step"]))),
        should_stop=lambda: steps[-1] >= 8,
    )
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, tmp_path / "cut", watcher=stop)
    cut = run(CONFIG, tmp_path / "cut")
    names = ("step", "train_loss", "max_logit")
    records = [[[r[n] for n in names] for r in x.metrics()] for x in (whole, cut)]
    assert records[0] == records[1]
    events = [e for e in cut.events() if e["event"] != "resumed"]
    assert events == whole.events()
    assert any(e.get("action") == "qk_clip" and e["step"] < 8 for e in events)


def test_what_an_autopilot_of_a_run_cannot_be():
    assert canonical("autopilot:tau=0.10") == "autopilot:tau=0.1"
    for error, text in (
        (InvalidValueError, "autopilot+z_loss"),
        (UnknownNameError, "autopilot:treshold=3"),
    ):
        with pytest.raises(error):
            canonical(text)
