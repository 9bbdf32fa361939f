"""Actions of all processes of a run or of none, agreed in the store, where a silent process blocks nobody for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from qkeel.dist.world import rank, world
from qkeel.errors import RefusedError
from qkeel.patching.parallel_training import process_store

T = TypeVar("T")

PATIENCE = 8.0  # seconds that processes may come apart to what all of them do
_FAILED = "failed: "
_ROUND = "qkeel/round"


class ApartError(RefusedError):
    """Something that every process of a run does or none, and that not all of them did. All of them raise an error."""


def done_by_all(what: str, act: Callable[[], T], word: Callable[[T], str], undo: Callable[[T], None]) -> T:
    """Returns what `act()` returns, if it succeeds on every process of the run and means the same on each.

    Where this is called again inside `act`, and fails there, the outer call says no more: every process knows.

    Args:
        what: its name in errors.
        act: is done on each process; it may wait for other processes only behind a call of this function.
        word: what was done, in words that must be the same on all processes.
        undo: takes back what was done where another process has failed, or has done something else.

    Raises:
        ApartError: another process failed, did something else, or said nothing for 8 seconds. What `act` itself
        raises is raised as it is, once the others know of it.
    """
    if world() == 1:
        return act()
    try:
        done = act()
    except ApartError:
        raise
    except Exception as error:
        _say(f"{_FAILED}{type(error).__name__}: {error}")
        raise
    try:
        words = words_of_all(what, word(done))
        if len(set(words)) > 1:
            raise ApartError(f"{what} is not the same on all processes of this run. {_unlike(words)}")
    except ApartError:
        undo(done)
        raise
    return done


def words_of_all(what: str, word: str) -> list[str]:
    """Returns what every process says, in the order of ranks, once all have said something.

    Raises: ApartError if a process says nothing for 8 seconds, or says that it has failed.
    """
    words = _say(word)
    if words is None:
        raise ApartError(
            f"{what} was called on some processes of this run only, or {PATIENCE:g} seconds apart. Every process must "
            "call it; where they reach it at very different times, let them wait for each other first with "
            "torch.distributed.barrier()"
        )
    for other, said in enumerate(words):
        if said.startswith(_FAILED):
            raise ApartError(f"{what} failed on process {other}, so no process has done it: {said[len(_FAILED) :]}")
    return words


def _say(word: str) -> list[str] | None:
    """The words of all processes in this round; None if one of them stays silent.

    The number of the round is common to all: a process that was silent in one meets the others in the next.
    """
    store = process_store()
    count = store.compare_set(_ROUND, "", "0").decode()
    keys = [f"{_ROUND}/{count}/{other}" for other in range(world())]
    store.set(keys[rank()], word)
    give_up = time.monotonic() + PATIENCE
    verdict = f"{_ROUND}/{count}/verdict"
    pause = 0.001
    while not (complete := store.check(keys)) and not store.check([verdict]) and time.monotonic() < give_up:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    # The first verdict is everyone's: one process may just have lost patience with another that was about to speak.
    final = store.compare_set(verdict, "", "complete" if complete else "silent").decode()
    store.compare_set(_ROUND, count, str(int(count) + 1))
    return [store.get(key).decode() for key in keys] if final == "complete" else None


def _unlike(words: Sequence[str]) -> str:
    """The words of the first process, and of the first one that says others."""
    other = next(i for i, said in enumerate(words) if said != words[0])
    return f"On process 0: {words[0]}. On process {other}: {words[other]}"


@final
class Membership:
    """A change that every process of a run has made, and that all of them must take back after the same step.

    Processes that train one model wait for each other in every step, so what one has said before a step is known to
    the others at the end of the step's passes: a look at the store without waiting is enough.
    """

    def __init__(self, what: str) -> None:
        self._what, self._steps, self._here, self._refused = what, 0, True, -1
        self._head = f"{_ROUND}/left/{process_store().compare_set(_ROUND, '', '0').decode()}"

    def leave(self) -> None:
        """This process has taken the change back."""
        self._here = False
        store = process_store()
        store.set(f"{self._head}/{rank()}", str(self._steps))
        store.compare_set(self._head, "", str(self._steps))

    def step(self) -> bool:
        """Called before each step; returns whether that is needed any longer.

        Raises: ApartError if not all processes have taken the change back before the same step.
        """
        store = process_store()
        if self._here and not (store.check([self._head]) and int(store.get(self._head).decode()) <= self._steps):
            self._steps += 1
            return True
        keys = [f"{self._head}/{other}" for other in range(world())]
        steps = [int(store.get(key).decode()) if store.check([key]) else None for key in keys]
        refused = f"{self._head}/refused/{self._steps}"  # this step, by some process: then all refuse it, once
        if len(set(steps)) == 1 and (self._refused == self._steps or not store.check([refused])):
            return False
        store.set(refused, "")
        self._refused = self._steps
        raise ApartError(
            f"{self._what} was not removed on all processes of this run after the same step: the number of steps that "
            f"each took with it is {', '.join('not over' if n is None else str(n) for n in steps)}. The step was not "
            "taken; remove it on every process after the same step"
        )
