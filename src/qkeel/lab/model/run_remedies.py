"""The remedies of runs: those of `qkeel.apply`, and `autopilot`, which decides for itself while the run trains."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from qkeel import remedies
from qkeel.autopilot import attach
from qkeel.autopilot.known_policies import spelled
from qkeel.errors import InvalidValueError
from qkeel.handle import Handle
from qkeel.lab.config import RunConfig
from qkeel.lab.model.optimizers import learning_rate
from qkeel.monitor import PlannedRates
from qkeel.monitor.watch import watch
from qkeel.registry import Term, parse
from qkeel.remedies import Note

AUTOPILOT, POLICY = "autopilot", "ladder"
RECORDS = 75  # that an autopilot sees of a run, at least, if it has as many steps


def canonical(text: str) -> str:
    """The one spelling of a run's remedy: an autopilot with options of its policy, or what `qkeel.apply` takes.

    Raises: InvalidValueError for an autopilot together with other remedies, or one that may add parameters, which a
    checkpoint of a run does not hold.

    >>> canonical("autopilot:tau=0.10")
    'autopilot:tau=0.1'
    """
    if not _is_autopilot(text):
        return remedies.canonical(text)
    term, *others = parse(text)
    if others:
        raise InvalidValueError(f"expected autopilot alone, which chooses remedies by itself, got {text!r}")
    return spelled(Term(POLICY, term.options)).replace(POLICY, AUTOPILOT, 1)


def _is_autopilot(text: str) -> bool:
    return any(term.name == AUTOPILOT for term in parse(text))


def not_stacked(text: str) -> list[str]:
    """The names of those remedies of a run that act inside its own forward pass, so that no stack has it."""
    return [AUTOPILOT] if _is_autopilot(text) else sorted({r.name for r in remedies.parse(text) if not r.stacks})


def note(text: str) -> Note:
    """Describes the remedy of a run, with its source.

    >>> note("autopilot").source
    'docs/guides/autopilot.md'
    """
    if not _is_autopilot(text):
        return remedies.note(text)
    return Note("watches the run and applies qk_clip and lalr to the heads that need it", "docs/guides/autopilot.md")


def rules(text: str) -> list[str]:
    """Returns the rules of a run's remedies that act on steps, the loss or a block, with their options in them.

    >>> rules("none"), rules("qk_lr:factor=0.5")[0][:6]
    ([], 'qk_lr:')
    """
    named = [] if _is_autopilot(text) else remedies.parse(text)
    return [f"{one.name}: {one.written_rule()}" for one in named if one.rule]


def put_on(config: RunConfig, model: nn.Module, optimizer: Optimizer) -> Handle:
    """Puts the remedy of a run on its model."""
    text = canonical(config.remedy)
    if not _is_autopilot(text):
        return remedies.apply(text, model, optimizer, train_length=config.data.context)
    rates = [learning_rate(config.optim, step, config.steps) for step in range(config.steps)]
    every = min(config.log_every, max(1, config.steps // RECORDS))
    monitor = watch(model, optimizer, every=every, stats="entropy", rules=(), planned=PlannedRates.of(rates))
    pilot = attach(monitor, optimizer, policy=text.replace(AUTOPILOT, POLICY, 1))
    pilot.warns = False
    return pilot
