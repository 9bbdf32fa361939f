"""The processes of a run: a gloo group of qkeel's own, in which they agree, and reductions in the training's group."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Literal, TypeVar, final

import torch
from torch import Tensor
from torch import distributed as torch_distributed
from torch.distributed import PrefixStore

from qkeel.errors import RefusedError, caution
from qkeel.patching.modes import CollectiveMode
from qkeel.patching.sharded_models import process_store

T = TypeVar("T")

# Seconds until a process that waits for another one says so.
PATIENCE = 8.0

_DONE, _FAILED, _GOES_ON = "done", "failed", "failed, but may go on in another way"
# An attribute of errors that all processes know of.
_TOLD = "_qkeel_told"
_AGREED = ContextVar("qkeel_agreed_collectives", default=False)


class ApartError(RefusedError):
    """An action was not performed on all processes of a run. Every process raises an error in this case."""


def on() -> bool:
    """True if torch.distributed is initialised."""
    return torch_distributed.is_available() and torch_distributed.is_initialized()


def world() -> int:
    """Returns the number of processes of the run, which is 1 without torch.distributed."""
    return torch_distributed.get_world_size() if on() else 1


def rank() -> int:
    """Returns this process's rank, which is 0 without torch.distributed."""
    return torch_distributed.get_rank() if on() else 0


def time_limit() -> float:
    """Returns the number of seconds that a process waits for others in a group of qkeel's own.

    It is half of the time of the training's group, so that this cannot run out while a process waits for one of ours.
    """
    store_timeout: timedelta = process_store().timeout  # pyright: ignore[reportAttributeAccessIssue]
    return store_timeout.total_seconds() / 2


def name_processes(ranks: Sequence[int]) -> str:
    """Returns "process 1" or "processes 1, 3"."""
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def announce(name: str) -> None:
    """Tells the other processes that this one has reached a point; does not wait for them."""
    process_store().set(f"qkeel/{name}/{rank()}", "here")


def absent(name: str, seconds: float, subject: str = "") -> list[int]:
    """Announces this process, and waits for the others to announce themselves under the same name.

    The first process that has seen all, or has waited long enough, decides for all of them: a process that comes later
    gets the same answer.

    Args:
        name: the point that all processes reach.
        seconds: how long to wait.
        subject: what a warning says after 8 seconds that the processes wait in; "" for no warning.

    Returns:
        The ranks that did not come.
    """
    store = process_store()
    keys = [f"qkeel/{name}/{other}" for other in range(world())]
    announce(name)
    begin = time.monotonic()
    # Short pauses for processes that arrive together, longer ones later, since each check is a request to one store.
    pause = 0.001
    while not store.check(keys) and not store.check([f"qkeel/{name}/absent"]):
        waited = time.monotonic() - begin
        if subject and waited > PATIENCE:
            missing = [
                other for other, key in enumerate(keys) if not store.check([key])
            ]
            caution(
                f"{subject} waits for {name_processes(missing)}, at most {seconds:g} seconds in total"
            )
            subject = ""
        if waited > seconds:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
    # compare_set keeps the first value, so a late process reads the decision instead of making another.
    decision = store.compare_set(
        f"qkeel/{name}/absent", "", ",".join(missing) or "none"
    ).decode()
    return [] if decision == "none" else [int(other) for other in decision.split(",")]


def withdraw(name: str) -> None:
    """Lets those who wait in `absent` under this name, or will do so, go on without this process; does not wait."""
    process_store().compare_set(f"qkeel/{name}/absent", "", str(rank()))


@final
class _Connection:
    """A gloo group and the tensors of its last collectives.

    A thread of the group may hold the tensors for a moment after a collective is done. If it were the last to hold
    them, it would need Python's lock to delete them, and a thread that waits for the lock while the interpreter ends
    aborts the process. So Python holds them until the next collective, and until the group's threads have ended.
    """

    def __init__(self, group: torch_distributed.ProcessGroupGloo) -> None:
        self._group: torch_distributed.ProcessGroupGloo | None = group
        self._tensors: list[Tensor] = []

    def holding(self, *tensors: Tensor) -> torch_distributed.ProcessGroupGloo:
        """Returns the group for a collective of these tensors.

        Raises: RuntimeError if this process has left the group.
        """
        if self._group is None:
            raise RuntimeError("this process has left the group")
        self._tensors = list(tensors)
        return self._group

    def close(self) -> None:
        """Ends the group's threads, which closes its connections, and then drops the tensors."""
        self._group = None
        self._tensors = []


@final
class OwnGroup:
    """A gloo group of some processes of a run, apart from the groups of the training.

    A process that ends, closes the group or comes too late is an error on the others, in their next call. A gloo group
    has no watchdog that ends the process, as that of NCCL does.
    """

    def __init__(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Must be called on all processes of the group, and all of them must be known to come.

        Args:
            name: a name that is new in this run.
            ranks: the members, or None for all processes.
        """
        members = list(range(world())) if ranks is None else list(ranks)
        store = PrefixStore(f"qkeel/{name}/{members[0]}", process_store())
        self.size = len(members)
        self._connection = _Connection(
            torch_distributed.ProcessGroupGloo(
                store, members.index(rank()), self.size, timedelta(seconds=time_limit())
            )
        )
        # Also called when the interpreter begins to end.
        self._finalizer = weakref.finalize(self, self._connection.close)

    def close(self) -> None:
        """Leaves the group."""
        self._finalizer()

    def reduce_(self, vector: Tensor, by: Literal["sum", "max"]) -> None:
        """Replaces a vector on the CPU by its sums or maxima over the group.

        Raises: RuntimeError if another process has left the group.
        """
        options = torch_distributed.AllreduceOptions()
        options.reduceOp = (
            torch_distributed.ReduceOp.MAX
            if by == "max"
            else torch_distributed.ReduceOp.SUM
        )  # pyright: ignore
        group = self._connection.holding(vector)
        group.allreduce([vector], options).wait()  # pyright: ignore[reportAttributeAccessIssue]

    def gather(self, value: T, subject: str = "") -> list[T]:
        """Returns the value of every process, in rank order. Values travel as pickles, as in `all_gather_object`.

        Args:
            value: the value of this process.
            subject: what a warning says after 8 seconds that the processes wait in; "" for no warning.

        Raises: RuntimeError if another process has left the group.
        """
        encoded = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        size = torch.tensor([len(encoded)])
        work = self._connection.holding(*sizes, size).allgather([sizes], [size])  # pyright: ignore
        self._warn_while_waiting(work, subject)
        work.wait()
        # gloo gathers tensors of one size.
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(encoded, (0, longest - len(encoded)))
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        group = self._connection.holding(*sizes, size, *rows, padded)
        group.allgather([rows], [padded]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        # What is behind a pickle's end is ignored.
        return [pickle.loads(bytes(row.numpy())) for row in rows]

    def _warn_while_waiting(self, work: torch_distributed.Work, subject: str) -> None:
        begin, pause = time.monotonic(), 0.0005
        while subject and not work.is_completed():
            if time.monotonic() - begin > PATIENCE:
                caution(
                    f"{subject} waits for other processes, at most {time_limit():g} seconds in total"
                )
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


# Actions that all processes of a run perform, or none: if one acted alone, the others would wait for it in a collective
# until it times out.


class _Meetings:
    """The group in which all processes of a run agree; it is made when they first do."""

    store: object = None
    group: OwnGroup | None = None
    runs = 0


# The subject, the status and the text.
_Message = tuple[str, str, str]


def _gather(subject: str, message: _Message) -> list[_Message]:
    """Returns the message of every process.

    Raises: ApartError if a process has ended or does not come within `time_limit()` seconds.
    """
    absent_ranks: list[int] = []
    try:
        # a new run of torch.distributed.
        if _Meetings.store is not process_store():
            _Meetings.store, _Meetings.group = process_store(), None
            _Meetings.runs += 1
            name = f"meetings {_Meetings.runs}"
            absent_ranks = absent(name, time_limit(), subject)
            if not absent_ranks:
                _Meetings.group = OwnGroup(name)
        if _Meetings.group is None:
            raise RuntimeError("the processes have lost each other")
        return _Meetings.group.gather(message, subject)
    except RuntimeError as error:
        # After a failure the members may be at different calls, so this group's messages would be mistaken for
        # others.
        _Meetings.group = None
        names = name_processes(absent_ranks) if absent_ranks else "another one"
        raise ApartError(
            f"{subject} was called on only some processes of this run: {names} has ended, or did not reach it within "
            f"{time_limit():g} seconds. Every process must call it; if they reach it at very different times, "
            "synchronise them first with torch.distributed.barrier()"
        ) from error


def _meet(subject: str, status: str, text: str) -> list[_Message]:
    """Returns the message of every process.

    Raises: ApartError if a process has failed, unless this one has failed too, or if the processes make different
        calls.
    """
    messages = _gather(subject, (subject, status, text))
    for other, (their_subject, their_status, their_text) in enumerate(messages):
        if their_status != _DONE and status == _DONE:
            raise ApartError(
                f"{their_subject} failed on process {other}, so no process has done it: {their_text}"
            )
    if status == _DONE:
        _check_alike(
            "the processes of this run make different calls",
            [message[0] for message in messages],
        )
    return messages


def _check_alike(subject: str, texts: Sequence[str]) -> None:
    """Raises: ApartError that quotes process 0 and the first process that differs from it."""
    for other, text in enumerate(texts):
        if text != texts[0]:
            raise ApartError(
                f"{subject}. On process 0: {texts[0]}. On process {other}: {text}"
            )


def gather_messages(subject: str, text: str) -> list[str]:
    """Returns what every process reports about a subject, in rank order, once all have reported.

    Processes may arrive at very different times: one that waits warns after 8 seconds, and waits at most half as long
    as the process group waits in a collective.

    Raises:
        ApartError: a process has failed, does not come, or reports on another subject. Every process raises it.
    """
    return [their_text for *_, their_text in _meet(subject, _DONE, text)]


def agree(
    subject: str,
    act: Callable[[], T],
    describe: Callable[[T], str] = lambda _: "",
    undo: Callable[[T], None] | None = None,
) -> T:
    """Runs `act()` and returns its result if it succeeds on every process of the run with the same outcome.

    Args:
        subject: the name of the action in error messages.
        act: the action. Inside it, only `agree` and collectives of `agreed_collectives` may wait for other processes.
        describe: returns a description of the outcome, which must be the same on all processes.
        undo: reverts the action if another process failed or had a different outcome.

    Raises:
        ApartError: another process failed, had a different outcome, or did not come.
        Exception: `act` itself raised it. It is raised again once the other processes know.
    """
    if world() == 1:
        return act()
    try:
        outcome = act()
    # All processes know of it already.
    except ApartError:
        raise
    except Exception as error:
        # The others wait for a message of this process, so they get one before the error is raised.
        if not vars(error).get(_TOLD):
            vars(error)[_TOLD] = True
            # This process has an error of its own.
            with suppress(ApartError):
                _meet(subject, _FAILED, f"{type(error).__name__}: {error}")
        raise
    try:
        descriptions = gather_messages(subject, describe(outcome))
        _check_alike(
            f"{subject} is not the same on all processes of this run", descriptions
        )
    except ApartError:
        if undo is not None:
            undo(outcome)
        raise
    return outcome


def fail_on_all(subject: str, error: Exception) -> None:
    """Reports to the other processes that this one failed, and returns if all of them have failed.

    It is for an action that has another way to go on, which all processes must then take.

    Raises:
        ApartError: the action failed on some processes but not on all.
    """
    statuses = [
        status
        for _, status, _ in _meet(subject, _GOES_ON, f"{type(error).__name__}: {error}")
    ]
    if any(status != _GOES_ON for status in statuses):
        message = f"{subject} failed on process {rank()}, so no process has done it: {type(error).__name__}: {error}"
        raise ApartError(message) from error
    vars(error)[_TOLD] = True


@contextmanager
def agreed_collectives(subject: str) -> Iterator[None]:
    """Lets all processes meet before each collective of more than one of them inside this context.

    If a process fails, the others get an error instead of waiting for it in a collective that it never reaches, and
    none of its later collectives is mistaken for one of this context. All processes of the run must enter it and call
    the same collectives.
    """

    def meet(ranks: Sequence[int], operator: str) -> None:
        if len(ranks) > 1:
            _meet(f"{subject} at {operator}", _DONE, "")

    # The outer context already meets, and two meetings at one collective would not match the other processes' one.
    if _AGREED.get():
        yield
        return
    token = _AGREED.set(True)
    try:
        with CollectiveMode(meet):
            yield
    finally:
        _AGREED.reset(token)


# Reductions in the training's own group, for remedies, whose steps are part of the training.


def collective_device() -> torch.device:
    """Returns the device that tensors in collectives of the training must be on: the GPU for NCCL, otherwise the
    CPU."""
    if on() and torch_distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reduced(
    vector: Tensor,
    by: Literal["sum", "max"],
    group: torch_distributed.ProcessGroup | None = None,
) -> Tensor:
    """Reduces [n] over a group of the training's processes (None: all) to sums or maxima [n] on each of them."""
    over_all = vector.to(collective_device(), copy=True)
    operator = (
        torch_distributed.ReduceOp.MAX
        if by == "max"
        else torch_distributed.ReduceOp.SUM
    )
    torch_distributed.all_reduce(over_all, operator, group=group)
    return over_all.to(vector.device)
