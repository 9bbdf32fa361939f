"""The processes of a run: decisions made through the store, and reductions that a failed process does not block."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, Self, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch import distributed as torch_distributed
from torch.distributed import DistError, ProcessGroup
from torch.optim import Optimizer

from qkeel.errors import RefusedError, caution
from qkeel.patching.modes import CollectiveMode, process_store

# The processes that train one model.


_AVAILABLE = torch_distributed.is_available()


def on() -> bool:
    """True if torch.distributed is initialised."""
    return _AVAILABLE and torch_distributed.is_initialized()


def world() -> int:
    """Returns the number of processes that train one model, which is 1 without torch.distributed."""
    return torch_distributed.get_world_size() if on() else 1


def rank() -> int:
    """Returns this process's rank, which is 0 without torch.distributed."""
    return torch_distributed.get_rank() if on() else 0


def collective_device() -> torch.device:
    """Returns the device that tensors in collectives must be on: the GPU for NCCL, otherwise the CPU."""
    if on() and torch_distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Messages between the ranks of a run, through the process group's store. A collective would wait forever for a silent
# rank, whereas the store shows which ranks have arrived.

PATIENCE = 8.0  # seconds for the other processes to arrive once one of them has failed, and until a first warning


def post_message(name: str, message: str) -> None:
    """Stores this rank's message under a name without waiting for the other ranks to read it."""
    if on():
        process_store().set(f"qkeel/{name}/{rank()}", message)


def try_gather_messages(name: str, message: str, patience: float | None) -> list[str] | None:
    """Stores a message and returns the messages of all ranks in rank order, or None if a rank did not arrive in time.

    The result is the same on every rank.

    Args:
        name: what the message is about. Each exchange of messages needs a different name.
        message: this rank's message.
        patience: how many seconds to wait for all ranks. With None, the wait is as long as the process group waits in a
            collective, with a warning after 8 seconds.
    """
    if not on():
        return [message]
    found = _meet_all(f"qkeel/{name}", name, message, patience)
    messages = [one for one in found if one is not None]
    return messages if len(messages) == len(found) else None


def all_posted(name: str) -> bool:
    """True if every rank has already stored a message under a name. Does not wait."""
    return process_store().check([f"qkeel/{name}/{other}" for other in range(world())])


def publish(name: str, text: str) -> None:
    """Stores a string for all ranks. All strings stored under the same name must be equal."""
    process_store().set(f"qkeel/{name}", text)


def published(name: str) -> str:
    """Returns the string that some rank stored under a name with `publish`."""
    return process_store().get(f"qkeel/{name}").decode()


def ordinal(kind: str) -> int:
    """Counts this rank's requests of each kind, so that matching requests get the same number on every rank."""
    return process_store().add(f"qkeel/{kind}/{rank()}", 1) if on() else 0


# Actions that either all processes of a run perform or none does. The processes agree through the store, where a silent
# process does not block the others for long.

T = TypeVar("T")

_FAILED = "failed: "
_REPORTED = "_qkeel_reported"  # an attribute of errors that all processes know of
_ROUND = "qkeel/round"
_AGREED = ContextVar("qkeel_agreed_collectives", default=False)


class ApartError(RefusedError):
    """An action was not performed on all processes of a run. Every process raises an error in this case."""


def run_on_all(
    what: str,
    act: Callable[[], T],
    word: Callable[[T], str],
    undo: Callable[[T], None],
    *,
    patience: float | None = None,
) -> T:
    """Runs `act()` and returns its result if it succeeds on every process of the run with the same outcome.

    In nested calls, the outer call does not report a failure of the inner call again, since every process already knows
    of it.

    Args:
        what: the name of the action in error messages.
        act: the action, which runs on each process. Inside it, only nested calls of this function may wait for other
            processes.
        word: returns a description of the outcome, which must be the same on all processes.
        undo: reverts the action if another process failed or had a different outcome.
        patience: as in `gather_messages`.

    Raises:
        ApartError: another process failed, had a different outcome, or did not arrive.
        BaseException: `act` itself raised it. It is re-raised once the other processes have been informed.
    """
    if world() == 1:
        return act()
    try:
        done = act()
    except ApartError:
        raise
    except BaseException as error:
        if not vars(error).get(_REPORTED):
            _report(what, f"{_FAILED}{type(error).__name__}: {error}", PATIENCE)
        raise
    try:
        words = gather_messages(what, word(done), patience=patience)
        if len(set(words)) > 1:
            raise ApartError(f"{what} is not the same on all processes of this run. {_unlike(words)}")
    except ApartError:
        undo(done)
        raise
    return done


def gather_messages(what: str, word: str, *, patience: float | None = None) -> list[str]:
    """Returns what every process reports about `what`, in rank order, once all have reported.

    Args:
        what: the subject of the reports.
        word: this process's report.
        patience: the number of seconds after which a silent process is an error. With None, processes may arrive at
            very different times: a waiting process warns after 8 seconds, and waits as long as the process group waits
            in a collective.

    Raises:
        ApartError: a process does not report, reports on a different subject, or has reported a failure. In the last
            case the processes that have not reported get 8 more seconds, and receive this error as soon as they report.
    """
    at, words = _report(what, word, patience)
    fault = _fault(at)
    if fault:
        raise ApartError(fault)
    silent = [other for other, said in enumerate(words) if said is None]
    if silent:
        raise ApartError(
            f"{what} was called on only some processes of this run: {_processes(silent)} did not reach it within "
            f"{_limit(patience):g} seconds. Every process must call it; if they reach it at very different times, "
            "synchronise them first with torch.distributed.barrier()"
        )
    said = [one.partition("\n") for one in words if one is not None]
    if len({matter for matter, *_ in said}) > 1:
        raise ApartError(f"the processes of this run make different calls. {_unlike([m for m, *_ in said])}")
    return [text for *_, text in said]


def fail_on_all(what: str, error: Exception) -> None:
    """Reports to the other processes that this one failed in `what`, and returns if all of them report a failure too.

    `run_on_all` does not report this error again: the others may have reported theirs from there, and would take a
    second report for the answer to their next call.

    Raises:
        ApartError: the call failed on some processes but not on all.
    """
    at, words = _report(what, f"{_FAILED}{type(error).__name__}: {error}", PATIENCE)
    if not all(said is not None and said.startswith(f"{what}\n{_FAILED}") for said in words):
        raise ApartError(_fault(at)) from error
    vars(error)[_REPORTED] = True


@contextmanager
def agreed_collectives(what: str) -> Iterator[None]:
    """Synchronises the processes before each of their collectives inside this context.

    If a process fails in `what`, the other processes get an error instead of waiting for it, and none of its later
    collectives is mistaken for one of this context."""
    token = _AGREED.set(True)
    with nullcontext() if token.old_value is True else CollectiveMode(functools.partial(_meet, what)):
        try:
            yield
        finally:
            _AGREED.reset(token)


def _meet(what: str, ranks: Sequence[int], operator: str) -> None:
    """Waits until all of these ranks have arrived at an operator.

    Raises:
        ApartError: a process has failed.
        RefusedError: a rank calls a different operator, or does not call one in time.
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
                gather_messages(what, "")  # raises, and releases the others
            over = [other for other in ranks if store.check([f"{at}/{other}"])]
            if (over or time.monotonic() > give_up) and not store.check(keys):
                raise RefusedError(
                    f"{what}: {_processes(over or ranks)} did not reach {operator}, which this process reached"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        words = [store.get(key).decode() for key in keys]
    if len(set(words)) > 1:
        raise RefusedError(f"{what} is not the same on all processes. {_unlike(words)}")


def _number() -> int:
    return int(process_store().compare_set(_ROUND, "", "0").decode())


@contextmanager
def _store_there() -> Iterator[None]:
    """Raises ApartError if the store is gone."""
    try:
        yield
    except DistError as error:
        raise ApartError("the process of this run that hosts the store has ended") from error


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
def _report(what: str, word: str, patience: float | None) -> tuple[str, list[str | None]]:
    """Stores this rank's message and returns the round's key and the messages of all ranks, with None for silent ranks.

    All ranks share the number of the round, so a rank that was silent in one round joins the others in the next.
    """
    store, number = process_store(), _number()
    at = f"{_ROUND}/{number}"
    _catch_up(what, number, patience)
    if word.startswith(_FAILED):
        fault = f"{what} failed on process {rank()}, so no process has done it: {word[len(_FAILED) :]}"
        store.compare_set(f"{at}/fault", "", fault)
    messages = _meet_all(at, what, f"{what}\n{word}", patience)
    store.compare_set(_ROUND, str(number), str(number + 1))
    return at, messages


def _meet_all(at: str, what: str, message: str, patience: float | None) -> list[str | None]:
    """Stores this rank's message and returns the messages of all ranks, with None for those that did not come in time.

    Every rank gets the same answer, because the first rank that has received all messages or has timed out decides for
    all of them.
    """
    store, keys = process_store(), [f"{at}/{other}" for other in range(world())]
    store.set(keys[rank()], message)
    complete = _waited(what, keys, f"{at}/verdict", f"{at}/fault", _limit(patience))
    own = [] if complete else [str(other) for other, key in enumerate(keys) if not store.check([key])]
    silent = store.compare_set(f"{at}/verdict", "", ",".join(own) or "none").decode().split(",")
    return [None if str(other) in silent else store.get(key).decode() for other, key in enumerate(keys)]


def _catch_up(what: str, number: int, patience: float | None) -> None:
    """Raises ApartError, instead of waiting in vain, if this rank arrives too late for an action that has failed."""
    store, joined = process_store(), f"{_ROUND}/joined/{rank()}"
    last = int(store.compare_set(joined, "", "-1").decode())
    store.set(joined, str(number))
    for missed in range(last + 1, number) if patience is None else ():
        if (fault := _fault(f"{_ROUND}/{missed}")).startswith(what):
            raise ApartError(fault)


def _waited(what: str, keys: Sequence[str], verdict: str, fault: str, limit: float) -> bool:
    """Waits for all keys. Returns False if a verdict came first or the time ran out."""
    store, begun, pause, warned = process_store(), time.monotonic(), 0.001, False
    give_up = begun + limit
    while not (complete := store.check(list(keys))) and not store.check([verdict]):
        now = time.monotonic()
        if store.check([fault]):
            give_up = min(give_up, now + PATIENCE)
        elif now > begun + PATIENCE and limit > PATIENCE and not warned:
            warned = True
            silent = [other for other, key in enumerate(keys) if not store.check([key])]
            caution(f"{what} waits for {_processes(silent)}, at most {limit:g} seconds in total")
        if now > give_up:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return complete


def _unlike(words: Sequence[str]) -> str:
    """Quotes process 0 and the first process that differs from it."""
    other = next(i for i, said in enumerate(words) if said != words[0])
    return f"On process 0: {words[0]}. On process {other}: {words[other]}"


# Collectives.


def reduced(vector: Tensor, by: Literal["sum", "max"], group: ProcessGroup | None = None) -> Tensor:
    """Reduces [n] over a group of processes (None: all) to sums or maxima [n] on each, in one collective."""
    return reduced_together([(vector, by)], group)[0]


def reduced_together(
    vectors: Sequence[tuple[Tensor, Literal["sum", "max"]]], group: ProcessGroup | None = None
) -> list[Tensor]:
    """Reduces several vectors as `reduced` does, with one collective per vector, and starts all collectives before
    waiting for any of them."""
    under_way = []
    for vector, by in vectors:
        found = vector.to(collective_device(), copy=True)
        how = torch_distributed.ReduceOp.MAX if by == "max" else torch_distributed.ReduceOp.SUM
        under_way.append((found, torch_distributed.all_reduce(found, how, group=group, async_op=True)))
    for _, work in under_way:
        work.wait()
    return [found.to(vector.device) for (found, _), (vector, _) in zip(under_way, vectors)]


# The exchange of values at the end of an optimizer step, and maxima over all processes that are sent with it.


@final
class StepExchange:
    """The all-reduces at the end of some optimizer steps.

    Maxima that are needed after each step are sent with them, so that they need no separate collective in such a step.
    All processes must have agreed on this exchange.
    """

    def __init__(self) -> None:
        self.maxima: list[StepMaxima] = []
        self.agreed = ""  # name of the exchange that all processes take part in

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """Returns the exchange of an optimizer, which all callers share."""
        return _OF.setdefault(optimizer, cls())  # type: ignore[return-value]

    def agree(self, name: str, counts: set[str]) -> None:
        """Records that all processes take part in the named exchange.

        `counts` holds the distinct values of `count` on the processes. If these differ, the maxima are not sent with
        the exchange."""
        self.agreed = name
        for one in self.maxima if len(counts) == 1 else ():
            one.sent_with = name

    @property
    def count(self) -> str:
        """The number of vectors of maxima, as a string that processes can compare."""
        return str(len(self.maxima))

    def reduce(self, name: str, largest: Tensor, sums: Sequence[Tensor]) -> list[Tensor]:
        """Reduces `largest` to its maxima and each of `sums` to its sum, and sends the pending maxima with them."""
        with_it = [one for one in self.maxima if one.sent_with == name and one.found is None]
        own = [one.own() for one in with_it]
        wide = functools.reduce(torch.promote_types, [x.dtype for x in own], largest.dtype)
        together = torch.cat([largest, *(x.to(largest.device) for x in own)]) if own else largest
        over_all, *others = reduced_together([(together.to(wide), "max"), *((x, "sum") for x in sums)])
        mine, *found = over_all.split([len(largest), *map(len, own)])
        for one, x in zip(with_it, found):
            one.found = x
        return [mine, *others]

    def largest(self, wanted: StepMaxima) -> Tensor:
        """Returns the maxima of `wanted` over all processes, once per step.

        Maxima that were not sent with an exchange are all reduced in one additional collective."""
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
    """A vector whose maxima over all processes are needed at the end of a step.

    Each entry may be known to only some of the processes. `sent_with` names the agreed exchange with which the vector
    is sent in steps that have this exchange; in other steps it is reduced separately. `own` is called once per step and
    returns this process's values, which contain no NaN and have the same dtype on all processes.
    """

    def __init__(self, own: Callable[[], Tensor], sent_with: str) -> None:
        self.own, self.sent_with = own, sent_with
        self.found: Tensor | None = None


_OF: WeakKeyDictionary[Optimizer, StepExchange] = WeakKeyDictionary()
