"""Which runs may train as one stack, and how many at once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Literal, TypeVar

from qkeel.errors import InvalidValueError
from qkeel.lab.config import RunConfig
from qkeel.lab.model import resolve
from qkeel.registry import parse
from qkeel.remedies import canonical

How = Literal["auto", "off"] | int
T = TypeVar("T")

_WORDS: tuple[Literal["auto"], Literal["off"]] = ("auto", "off")

# Those that change the spec or a block's norms, which the stack's twins follow, and those that act on a run's own
# optimizer. Hooks on a forward pass, weights computed from others and random numbers are not for a stack.
REMEDIES = frozenset(
    (
        "none",
        "qk_norm",
        "qkv_norm",
        "key_norm",
        "query_norm",
        "cosine",
        "softcap",
        "log_n",
        "attention_temperature",
        "sigmoid",
        "softpick",
        "sink",
        "qk_clip",
        "lalr",
        "qk_lr",
        "qk_weight_decay",
        "swin_norm",
        "peri_norm",
    )
)
AT_ONCE = 16  # runs in a stack where nothing else is said: more bring nothing, and their numbers leave the cache
WIDEST, MOST_TOKENS = 128, 2048  # of models and of a step, up to which "auto" stacks: beyond, products fill a core


def stackable(config: RunConfig) -> bool:
    """Whether runs of a resolved configuration can train in a stack, to the numbers that they have alone."""
    return (
        config.data.task == "text"
        and config.device == "cpu"
        and config.dtype == "fp32"
        and not config.compile
        and config.accumulate == 1
        and not config.optim.z_loss
        and config.model.block == "mha"
        and REMEDIES.issuperset(term.name for term in parse(canonical(config.remedy)))
    )


def small(config: RunConfig) -> bool:
    """Whether a stack is faster than its runs one by one."""
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
    """Put runs that differ in learning rate and seed only together: at most so many, and work for every worker.

    Args:
        runs: each a configuration and what stands for it in the result. how: "off" leaves every run alone, a number
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
    # What does not divide evenly among the workers is cut finer, so that they end together.
    rest = len(found) % workers if len(found) > workers else 0
    found = [part for i, s in enumerate(found) for part in _cut(s, min(len(s), -(-workers // rest)) if i < rest else 1)]
    return [[thing for _, thing in stack] for stack in found]


def _cut(group: list[T], parts: int) -> list[list[T]]:
    """As many parts, as even as can be."""
    cuts = [len(group) * i // parts for i in range(parts + 1)]
    return [group[a:b] for a, b in itertools.pairwise(cuts)]


def _kind(config: RunConfig, how: How) -> str | None:
    """What runs of one stack have in common; None for a run that is better alone."""
    if not stackable(config) or (how == "auto" and not small(config)):
        return None
    values = config.to_dict()
    values["optim"] = {k: v for k, v in values["optim"].items() if k != "lr"}
    return json.dumps({k: v for k, v in values.items() if k != "seed"}, sort_keys=True)
