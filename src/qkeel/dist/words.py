"""Words that the processes of one run leave for each other under a name, in the store that they met at."""

from __future__ import annotations

from datetime import timedelta

from qkeel.dist.world import on, rank, world
from qkeel.patching.parallel_training import process_store


def leave_word(name: str, word: str) -> None:
    """Leaves this process's word under a name, for others to read when they come to it; waits for nobody."""
    if on():
        process_store().set(_key(name, rank()), word)


def words_under(name: str, word: str, patience: float) -> list[str] | None:
    """Leaves a word and returns those of all processes, in the order of ranks, the same answer on each.

    None if some process has left none within `patience` seconds. Goes through the store and not through a collective,
    which would wait for a silent process for ever.
    """
    if not on():
        return [word]
    leave_word(name, word)
    store, keys = process_store(), [_key(name, other) for other in range(world())]
    try:
        store.wait(keys, timedelta(seconds=patience))
        verdict = "heard"
    except RuntimeError:  # each kind of store has its own error
        verdict = "alone"
    # The first verdict is everyone's: one process may just have lost patience with another that was about to speak.
    if store.compare_set(f"qkeel/{name}/verdict", "", verdict).decode() == "alone":
        return None
    return [store.get(key).decode() for key in keys]


def left_by_all(name: str) -> bool:
    """Returns whether every process has left a word under a name; waits for nobody."""
    return process_store().check([_key(name, other) for other in range(world())])


def publish(name: str, text: str) -> None:
    """Leaves a text for all processes; all texts that are left under one name are the same."""
    process_store().set(f"qkeel/{name}", text)


def published(name: str) -> str:
    """Returns a text that a process has left."""
    return process_store().get(f"qkeel/{name}").decode()


def ordinal(kind: str) -> int:
    """The count of this process's requests of this kind; the same thing gets the same one everywhere."""
    return process_store().add(f"qkeel/{kind}/{rank()}", 1) if on() else 0


def _key(name: str, of: int) -> str:
    return f"qkeel/{name}/{of}"
