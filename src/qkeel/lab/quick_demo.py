"""`qkeel demo --quick`: two tiny models in ten seconds, of which one collapses, as lines in a terminal.

Its closing sentence is its own; the verdict on a run is that of `metrics.verdict`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from qkeel.errors import AlarmWarning
from qkeel.lab.build_run import learning_rate, resolve, threads
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import RunConfig, with_values
from qkeel.lab.train import train_step
from qkeel.metrics import COLLAPSE_ENTROPY
from qkeel.monitor import PlannedRates, Severity
from qkeel.monitor.watch import watch

STEPS = 60
# At this rate attention without a remedy collapses within STEPS on any processor: its entropy ends at a fifth of the
# threshold. It does so slowly enough for a forecast to be worth reading.
RATE = 0.15
REMEDY = "qk_norm"
# Steps.
PRINTED_EVERY = 15


def quick_demo(say: Callable[[str], None], steps: int = STEPS) -> None:
    """Trains a model without a remedy and one with QK-norm at a high learning rate, and says what happens to them.

    Both models start from the same weights and read the same text. Nothing is written to the disk.

    >>> lines = []
    >>> quick_demo(lines.append, steps=2)
    >>> "with qk_norm:" in lines
    True

    Args:
        say: called with each line of text, while the models train.
        steps: the number of optimizer steps of each model.
    """
    base = with_values(
        RunConfig(), optim={"lr": RATE, "schedule": "constant"}, steps=steps
    )
    say(
        f"Two tiny models learn the text of Python's library, {steps} steps each, at a learning rate of {RATE:g}."
    )
    say("They begin with the same weights and read the same text.")
    with threads(base.threads):
        for remedy in ("none", REMEDY):
            say("")
            say("without a remedy:" if remedy == "none" else f"with {remedy}:")
            _train(with_values(base, remedy=remedy), say)
    say("")
    say(
        "Next: `qkeel watch -- python train.py` watches your own model, `qkeel demo` compares six remedies."
    )


def _train(config: RunConfig, say: Callable[[str], None]) -> None:
    """Trains one model, and says every alarm and every PRINTED_EVERY-th step."""
    state = RunState(resolve(config))
    rates = PlannedRates.of(
        [
            learning_rate(config.optim, step, config.steps)
            for step in range(config.steps)
        ]
    )
    with (
        watch(state.model, state.optimizer, planned=rates) as monitor,
        warnings.catch_warnings(),
    ):
        # They are said below, without their advice.
        warnings.simplefilter("ignore", AlarmWarning)
        n_alarms = 0
        for step in range(config.steps):
            loss, _ = train_step(state, step)
            for alarm in monitor.alarms[n_alarms:]:
                if alarm.severity is not Severity.NOTICE:
                    say(f"  {alarm.heading}: {alarm.meaning}")
            n_alarms = len(monitor.alarms)
            if (step + 1) % PRINTED_EVERY == 0:
                heads = monitor.history.heads
                largest, entropy = (
                    heads["max_logit"][-1].max(),
                    heads["entropy"][-1].mean(),
                )
                say(
                    f"  step {step + 1:>3}: loss {float(loss):.2f}, largest logit {largest:,.4g}, entropy {entropy:.2f}"
                )
        entropy = monitor.history.heads["entropy"][-1].mean()
    if entropy < COLLAPSE_ENTROPY:
        say("  Attention has collapsed: nearly every query attends to a single key.")
    else:
        say("  Attention is healthy.")
