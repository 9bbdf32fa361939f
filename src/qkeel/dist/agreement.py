"""The processes of a run, how they agree that all of them do a thing or none does, and reductions over them."""

from __future__ import annotations

import torch
from torch import distributed as torch_distributed
from datetime import timedelta
from qkeel.patching.modes import process_store
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar, final
from torch.distributed import DistError
from qkeel.errors import RefusedError, caution
from qkeel.patching.modes import CollectiveMode
from typing import Literal
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from collections.abc import Callable
from typing import Self, final
from weakref import WeakKeyDictionary
from torch.optim import Optimizer


# The processes that run this model.

_AVAILABLE = torch_distributed.is_available()


def on() -> bool:
    """Returns whether torch.distributed is in use."""
    return _AVAILABLE and torch_distributed.is_initialized()


def world() -> int:
    """The number of processes that train one model; 1 where torch.distributed is not in use."""
    return torch_distributed.get_world_size() if on() else 1


def rank() -> int:
    """This process's number among them."""
    return torch_distributed.get_rank() if on() else 0


def collective_device() -> torch.device:
    """The device that tensors must be on to be gathered: the GPU for NCCL, else the CPU."""
    if on() and torch_distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Words that the processes of one run leave for each other under a name, in the store that they met at.

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


# Actions of all processes of a run or of none, agreed in the store, where a silent process blocks nobody for long.

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
            f"{what} was called on some processes of this run only: {_processes(silent)} did not reach it within "
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
        self._over = False  # the store is gone: there is nobody to tell

    def leave(self) -> None:
        """This process has taken the change back; where the process that holds the store has ended, nobody is notified."""
        self._here = False
        try:
            store = process_store()
            store.set(f"{self._head}/{rank()}", str(self._steps))
            store.compare_set(self._head, "", str(self._steps))
        except (DistError, ValueError):  # ended, or this process has left its group
            self._over = True

    def step(self) -> bool:
        """Called before each step; returns whether that is needed any longer.

        Raises: ApartError if not all processes have taken the change back before the same step.
        """
        if self._over:
            return False
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


# Collectives, in which nobody waits for a process that has failed.

_FAILED_THERE = "qkeel/failed"
_USUAL = 0.5  # seconds of waiting after which the store is asked whether there is anybody to wait for


def reduced(vector: Tensor, by: Literal["sum", "max"], group: ProcessGroup | None = None) -> Tensor:
    """[n] on every process of a group (all of them: None) -> their sums or maxima [n] on each, by one collective.

    Raises: ApartError if a process that it waits for on the host has said that it failed.
    """
    found = vector.to(collective_device())
    how = torch_distributed.ReduceOp.MAX if by == "max" else torch_distributed.ReduceOp.SUM
    work = torch_distributed.all_reduce(found, how, group=group, async_op=True)
    _wait(work, found)
    return found.to(vector.device)


def gather(vector: Tensor) -> Tensor:
    """[n] on every process -> [world n] on each, in the order of ranks, by one collective.

    Raises: ApartError if a process that it waits for on the host has said that it failed.
    """
    if not on():
        return vector[None]
    out = vector.new_empty(world() * vector.numel())
    # torch 2.13 renamed it and warns of the old name.
    all_gather = getattr(torch_distributed, "all_gather_single", torch_distributed.all_gather_into_tensor)
    _wait(all_gather(out, vector.contiguous(), async_op=True), out)
    return out.view(world(), -1)


def say_failed(why: str) -> None:
    """Tell the processes that wait for this one in a reduction that it does not come."""
    if on():
        process_store().set(_FAILED_THERE, f"process {rank()}: {why}")


def _wait(work: Work | None, result: Tensor) -> None:
    """Wait until a collective is over, or some process has failed; for a GPU's its stream waits, not the host."""
    assert work is not None
    begun = asked = time.monotonic()
    while result.is_cpu and not work.is_completed():
        now = time.monotonic()
        time.sleep(min(0.1 * (now - begun), 0.01))  # a tenth longer than need be, and no processor kept busy
        if now > asked + _USUAL:
            asked = now
            if process_store().check([_FAILED_THERE]):
                raise ApartError(
                    f"this process waited for one that has failed, {process_store().get(_FAILED_THERE).decode()}"
                )
    work.wait()


# The gather that ends an optimizer's step, and the maxima over all processes that are sent with it.

@final
class StepGather:
    """The gather at the end of some steps of an optimizer. Maxima that are wanted after each step are sent with it, so
    that such a step has one collective; all processes must have agreed on that."""

    def __init__(self) -> None:
        self.maxima: list[StepMaxima] = []
        self.agreed = ""  # the name of the gather that all processes take part in

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """The one of an optimizer, which is the same for all who ask."""
        return _OF.setdefault(optimizer, cls())  # type: ignore[return-value]

    def agree(self, name: str, counts: set[str]) -> None:
        """All processes take part in the gather of this name; `counts`: what each of them said of `count`."""
        self.agreed = name
        for one in self.maxima if len(counts) == 1 else ():
            one.sent_with = name

    @property
    def count(self) -> str:
        """The number of vectors of maxima, to be compared over the processes."""
        return str(len(self.maxima))

    def gather(self, name: str, vector: Tensor) -> Tensor:
        """[n] on every process -> [world n] on each; the maxima are sent behind it, and handed to who wants them."""
        with_it = [one for one in self.maxima if one.sent_with == name and one.found is None]
        sent = [vector, *(one.own().to(vector) for one in with_it)]
        rows, *others = gather(torch.cat(sent)).split([len(x) for x in sent], 1)
        for one, found in zip(with_it, others):
            one.found = found.amax(0)
        return rows

    def largest(self, wanted: StepMaxima) -> Tensor:
        """The maxima over all processes, once a step; those that no gather took along, by one collective for all."""
        if wanted.found is None:
            left = [one for one in self.maxima if one.found is None]
            own = [one.own() for one in left]
            over_all = reduced(torch.cat([x.to(own[0]) for x in own]), "max")
            for one, found in zip(left, over_all.split([len(x) for x in own])):
                one.found = found
        found, wanted.found = wanted.found, None
        assert found is not None
        return found


@final
class StepMaxima:
    """A vector of which each process knows some numbers at the end of a step, and whose maxima over all are wanted.

    `sent_with` is the name of the gather, agreed by all processes, that takes it along where one is made in a step;
    else it is reduced; `own` is asked once a step. None of the numbers is NaN.
    """

    def __init__(self, own: Callable[[], Tensor], sent_with: str) -> None:
        self.own, self.sent_with = own, sent_with
        self.found: Tensor | None = None


_OF: WeakKeyDictionary[Optimizer, StepGather] = WeakKeyDictionary()
