"""The choice of runs that may train as one stack, and of how many at once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Literal, TypeVar

from qkeel.errors import InvalidValueError
from qkeel.lab.config import RunConfig
from qkeel.lab.model.build_model import resolve
from qkeel.lab.model.run_remedies import not_stacked

How = Literal["auto", "off"] | int
T = TypeVar("T")

_WORDS: tuple[Literal["auto"], Literal["off"]] = ("auto", "off")

AT_ONCE = 16  # runs in a stack where nothing else is said: more bring nothing, and their numbers leave the cache
# Each run of a stack has rates and decay of its own, and its own number of steps.
_OWN_RATES = ("lr", "warmup", "schedule", "final", "weight_decay", "decay")
WIDEST, MOST_TOKENS = 128, 2048  # of models and of a step, up to which "auto" stacks: beyond, products fill a core


def why_not_stacked(config: RunConfig) -> str:
    """The reason why runs of a resolved configuration differ in a stack from runs alone; empty if they do not.

    >>> why_not_stacked(RunConfig(device="cpu", dtype="fp32", accumulate=2))
    'a step is computed in 2 parts'
    """
    remedies = not_stacked(config.remedy)
    reasons = (
        (config.data.task != "text", f"the task is {config.data.task}, not text"),
        (config.device != "cpu", f"the device is {config.device}, not a CPU"),
        (config.dtype != "fp32", f"the arithmetic is {config.dtype}, not fp32"),
        (config.compile, "the model trains through torch.compile"),
        (config.accumulate != 1, f"a step is computed in {config.accumulate} parts"),
        (config.optim.z_loss > 0, "the loss has a z-loss"),
        (config.model.block != "mha", f"the model is of {config.model.block}, not multi-head attention"),
        (bool(remedies), f"{', '.join(remedies)} acts inside a run's own forward pass"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def small(config: RunConfig) -> bool:
    """Returns whether a stack is faster than its runs one by one."""
    return config.model.d_model <= WIDEST and config.data.batch * config.data.context <= MOST_TOKENS


def check_how(how: object) -> How:
    """Auto, off or a number of runs, which may be written as text; raises for anything else."""
    for word in _WORDS:
        if how == word:
            return word
    number = int(how) if isinstance(how, str) and how.isdigit() else how
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidValueError(f"expected stack to be auto, off or a number of runs of at least 1, got {how!r}")
    return number


def plan_stacks(runs: Sequence[tuple[RunConfig, T]], how: How, workers: int) -> list[list[T]]:
    """Returns groups of runs, alike but for seed, steps, rates and decay, to train as one; every worker has work.

    Args:
        runs: each a configuration and what the result names it by. how: "off" leaves every run alone, a number
            is that of runs in a stack, "auto" stacks small models.

    Raises: InvalidValueError for another `how`.
    """
    how = check_how(how)
    most = AT_ONCE if how == "auto" else 1 if how == "off" else how
    most = max(1, min(most, -(-len(runs) // max(1, workers))))
    alike: dict[str, list[tuple[RunConfig, T]]] = {}
    for number, (config, thing) in enumerate(runs):
        kind = _kind(resolve(config), how) if most > 1 else None
        alike.setdefault(kind or str(number), []).append((config, thing))
    # Runs of one seed share their batches.
    groups = [sorted(group, key=lambda one: one[0].seed) for group in alike.values()]
    found = [part for group in groups for part in _cut(group, -(-len(group) // most))]
    # What does not divide evenly among the workers is cut finer, so that they end at the same time.
    rest = len(found) % workers if len(found) > workers else 0
    found = [part for i, s in enumerate(found) for part in _cut(s, min(len(s), -(-workers // rest)) if i < rest else 1)]
    return [[thing for _, thing in stack] for stack in found]


def _cut(group: list[T], parts: int) -> list[list[T]]:
    """As many parts, as even as can be."""
    cuts = [len(group) * i // parts for i in range(parts + 1)]
    return [group[a:b] for a, b in itertools.pairwise(cuts)]


def _kind(config: RunConfig, how: How) -> str | None:
    """The properties that runs of one stack share; None for a run that is better alone."""
    if why_not_stacked(config) or (how == "auto" and not small(config)):
        return None
    values = config.to_dict()
    values["optim"] = {k: v for k, v in values["optim"].items() if k not in _OWN_RATES}
    return json.dumps({k: v for k, v in values.items() if k not in ("seed", "steps", "nudge")}, sort_keys=True)
