"""Agreement of the processes of one run, through the store that they met at: no process waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

from qkeel.dist.world import on, rank, world
from qkeel.patching.parallel_training import process_store

Verdict = Literal["together", "apart", "alone"]


def agree(name: str, word: str, patience: float = 60.0) -> Verdict:
    """Returns whether all processes say the same word under this name, the same answer on each.

    "apart" if the words differ; "alone" if some process says none within `patience` seconds. Goes through the store
    that the processes met at and not through a collective, which would wait for a silent process for ever.
    """
    if not on():
        return "together"
    store = process_store()
    keys = [f"qkeel/{name}/{other}" for other in range(world())]
    store.set(keys[rank()], word)
    try:
        store.wait(keys, timedelta(seconds=patience))
        verdict = _same([store.get(key).decode() for key in keys])
    except RuntimeError:  # each kind of store has its own error
        verdict = "alone"
    # The first verdict is everyone's: one process may just have lost patience with another that was about to speak.
    final = store.compare_set(f"qkeel/{name}/verdict", "", verdict).decode()
    return next(v for v in ("together", "apart", "alone") if v == final)


def _same(words: Sequence[str]) -> Verdict:
    return "together" if len(set(words)) == 1 else "apart"


def ordinal(kind: str) -> int:
    """The count of this process's requests of this kind; the same thing gets the same one everywhere."""
    if not on():
        return 0
    return process_store().add(f"qkeel/{kind}/{rank()}", 1)
