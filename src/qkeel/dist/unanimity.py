"""Actions of all processes of a run or of none, agreed in the store, where a silent process blocks nobody for long."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar, final

from torch.distributed import DistError

from qkeel.dist.world import rank, world
from qkeel.errors import RefusedError, caution
from qkeel.patching.modes import CollectiveMode
from qkeel.patching.parallel_training import process_store

T = TypeVar("T")

PATIENCE = 8.0  # seconds that processes are given to come to what all of them do, once one of them has failed
_FAILED = "failed: "
_ROUND = "qkeel/round"
_AGREED = ContextVar("qkeel_agreed_collectives", default=False)


class ApartError(RefusedError):
    """Something that every process of a run does or none, and that not all of them did. All of them raise an error."""


def done_by_all(
    what: str,
    act: Callable[[], T],
    word: Callable[[T], str],
    undo: Callable[[T], None],
    *,
    patience: float | None = None,
) -> T:
    """Returns what `act()` returns, if it succeeds on every process of the run and means the same on each.

    Where this is called again inside `act`, and fails there, the outer call says no more: every process knows.

    Args:
        what: its name in errors.
        act: is done on each process; it may wait for other processes only behind a call of this function.
        word: what was done, in words that must be the same on all processes.
        undo: takes back what was done where another process has failed, or has done something else.
        patience: as in `words_of_all`.

    Raises:
        ApartError: another process failed, did something else, or did not come. What `act` itself raises is raised as
        it is, once the others know of it.
    """
    if world() == 1:
        return act()
    try:
        done = act()
    except ApartError:
        raise
    except BaseException as error:
        _say(what, f"{_FAILED}{type(error).__name__}: {error}", PATIENCE)
        raise
    try:
        words = words_of_all(what, word(done), patience=patience)
        if len(set(words)) > 1:
            raise ApartError(f"{what} is not the same on all processes of this run. {_unlike(words)}")
    except ApartError:
        undo(done)
        raise
    return done


def words_of_all(what: str, word: str, *, patience: float | None = None) -> list[str]:
    """Returns what every process says of `what`, in the order of ranks, once all have said something.

    patience: seconds after which a silent process is an error. None is for what a process may come to much later than
    others, who warn after 8 seconds and wait as long as the process group waits in a collective.

    Raises: ApartError if a process stays silent, says something of another matter, or has said that it failed: then
    those that are silent have 8 seconds left, and get this error as soon as they say something.
    """
    at, words = _say(what, word, patience)
    fault = _fault(at)
    if fault:
        raise ApartError(fault)
    silent = [other for other, said in enumerate(words) if said is None]
    if silent:
        raise ApartError(
            f"{what} was called on some processes of this run only: {_processes(silent)} did not come to it within "
            f"{_limit(patience):g} seconds. Every process must call it; where they reach it at very different times, "
            "let them wait for each other first with torch.distributed.barrier()"
        )
    said = [one.partition("\n") for one in words if one is not None]
    if len({matter for matter, *_ in said}) > 1:
        raise ApartError(f"the processes of this run call different things. {_unlike([m for m, *_ in said])}")
    return [text for *_, text in said]


def failed_on_all(what: str, error: Exception) -> None:
    """Tells the other processes that this one has failed in `what`; returns if each of them says the same.

    Raises: ApartError if not.
    """
    at, words = _say(what, f"{_FAILED}{type(error).__name__}: {error}", PATIENCE)
    if not all(said is not None and said.startswith(f"{what}\n{_FAILED}") for said in words):
        raise ApartError(_fault(at)) from error


@contextmanager
def agreed_collectives(what: str) -> Iterator[None]:
    """While it lasts, processes meet before each of their collectives: where one of them fails in `what`, the others
    get an error instead of waiting for it, and none of its later collectives is taken for this one."""
    token = _AGREED.set(True)
    with nullcontext() if token.old_value is True else CollectiveMode(functools.partial(_meet, what)):
        try:
            yield
        finally:
            _AGREED.reset(token)


def _meet(what: str, ranks: Sequence[int], operator: str) -> None:
    """Waits until all of these processes have come to an operator.

    Raises: ApartError if a process has failed. RefusedError if one of these calls another operator, or none in time.
    """
    with _store_there():
        store, at, pause = process_store(), f"{_ROUND}/{_number()}", 0.001
        give_up = time.monotonic() + _limit(None)
        here = f"{at}/{'-'.join(map(str, ranks))}"
        here += f"/{store.add(f'{here}/{rank()}', 1)}"
        keys = [f"{here}/{other}" for other in ranks]
        store.set(f"{here}/{rank()}", operator)
        while not store.check(keys):
            if _fault(at):
                words_of_all(what, "")  # raises, and lets the other go on
            over = [other for other in ranks if store.check([f"{at}/{other}"])]
            if (over or time.monotonic() > give_up) and not store.check(keys):
                raise RefusedError(f"{what}: {_processes(over or ranks)} did not come to {operator}, as this one did")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        words = [store.get(key).decode() for key in keys]
    if len(set(words)) > 1:
        raise RefusedError(f"{what} is not the same on all processes. {_unlike(words)}")


def _number() -> int:
    return int(process_store().compare_set(_ROUND, "", "0").decode())


@contextmanager
def _store_there() -> Iterator[None]:
    """Raises ApartError where the store is gone."""
    try:
        yield
    except DistError as error:
        raise ApartError("another process of this run, at which all of them meet, has ended") from error


def _fault(at: str) -> str:
    store, key = process_store(), f"{at}/fault"
    return store.get(key).decode() if store.check([key]) else ""


def _limit(patience: float | None) -> float:
    if patience is not None:
        return patience
    return process_store().timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]


def _processes(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@_store_there()
def _say(what: str, word: str, patience: float | None) -> tuple[str, list[str | None]]:
    """The round, and the words of all processes in it, None of those that stay silent.

    The number of the round is common to all: a process that was silent in one meets the others in the next.
    """
    store, number = process_store(), _number()
    at = f"{_ROUND}/{number}"
    _catch_up(what, number, patience)
    keys = [f"{at}/{other}" for other in range(world())]
    if word.startswith(_FAILED):
        fault = f"{what} failed on process {rank()}, so no process has done it: {word[len(_FAILED) :]}"
        store.compare_set(f"{at}/fault", "", fault)
    store.set(keys[rank()], f"{what}\n{word}")
    verdict = f"{at}/verdict"
    complete = _waited(what, keys, verdict, f"{at}/fault", _limit(patience))
    # The first verdict is everyone's: one process may just have lost patience with another that was about to speak.
    final = store.compare_set(verdict, "", "complete" if complete else "silent").decode()
    store.compare_set(_ROUND, str(number), str(number + 1))
    here = [final == "complete" or store.check([key]) for key in keys]
    return at, [store.get(key).decode() if said else None for key, said in zip(keys, here)]


def _catch_up(what: str, number: int, patience: float | None) -> None:
    """Raises ApartError if this process comes too late to what has failed since, and might wait long for nobody."""
    store, joined = process_store(), f"{_ROUND}/joined/{rank()}"
    last = int(store.compare_set(joined, "", "-1").decode())
    store.set(joined, str(number))
    for missed in range(last + 1, number) if patience is None else ():
        if (fault := _fault(f"{_ROUND}/{missed}")).startswith(what):
            raise ApartError(fault)


def _waited(what: str, keys: Sequence[str], verdict: str, fault: str, limit: float) -> bool:
    """Waits until all keys are there, and returns whether they are: not if there is a verdict, or time is up."""
    store, begun, pause, warned = process_store(), time.monotonic(), 0.001, False
    give_up = begun + limit
    while not (complete := store.check(list(keys))) and not store.check([verdict]):
        now = time.monotonic()
        if store.check([fault]):
            give_up = min(give_up, now + PATIENCE)
        elif now > begun + PATIENCE and limit > PATIENCE and not warned:
            warned = True
            silent = [other for other, key in enumerate(keys) if not store.check([key])]
            caution(f"{what} waits for {_processes(silent)}, at most {limit:g} seconds in all")
        if now > give_up:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return complete


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
        self._head = f"{_ROUND}/left/{_number()}"

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
