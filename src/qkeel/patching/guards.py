"""Guards around what qkeel calls while a model runs, and hooks that run in one thread and in no copy."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, final

import torch
from torch._C import _len_torch_dispatch_stack

from qkeel.errors import QkeelError, caution
from qkeel.patching.modes import outside_checkpoints

# Guards around everything that qkeel calls during training, so that its errors do not disturb the training.

T = TypeVar("T")
# Called as guard(function, *arguments).
Guarded = Callable[..., Any]


@final
class FaultGuard:
    """Calls functions so that none of their exceptions reaches the caller.

    The first exception is kept in `error` and reported in one warning. Then each function in `off` is called, to switch
    off what failed. Later exceptions are dropped. Interrupts (KeyboardInterrupt, SystemExit) pass through.

    With `forks=False`, nothing is called in processes that are forked later, whose copies of what records would write
    to the files of this one.

    Example:
        >>> guard = FaultGuard("the watcher is off: {}")
        >>> guard(int, "7")
        7
    """

    def __init__(
        self, words: str, *off: Callable[[], None], forks: bool = True
    ) -> None:
        """Takes the text of the warning, with {} for the error, and the functions that switch off what failed."""
        self.words, self.off = words, list(off)
        self._pid = None if forks else os.getpid()
        self.error: Exception | None = None
        # Threads in which a guarded function runs.
        self._inside: set[int] = set()
        # The host time spent in guarded functions in all threads. Nested calls are counted once.
        self.seconds = 0.0

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one of a guard that calls nothing in such processes."""
        return self._pid is not None and os.getpid() != self._pid

    def __call__(self, act: Callable[..., T], *args: object) -> T | None:
        if self.is_forked:
            return None
        thread = threading.get_ident()
        begun = None if thread in self._inside else time.perf_counter()
        self._inside.add(thread)
        try:
            # What it computes, a selective checkpoint must not store.
            if _len_torch_dispatch_stack():
                with outside_checkpoints():
                    return act(*args)
            return act(*args)
        except Exception as error:
            if self.error is None:
                self._report(error)
            return None
        finally:
            if begun is not None:
                self._inside.discard(thread)
                self.seconds += time.perf_counter() - begun

    def _report(self, error: Exception) -> None:
        try:
            text = (
                str(error)
                if isinstance(error, QkeelError)
                else f"{type(error).__name__}: {error}"
            )
            caution(self.words.format(text))
        except Exception:  # the stack or the memory is still exhausted; the next fault will be reported
            return
        self.error = error
        # Guarded as well: what switches off may fail for the same reason, which has been reported by now.
        for act in self.off:
            self(act)


# A hook that does nothing, and that Python itself has, so that copies and pickles of a model load without qkeel.
idle: Callable[..., None] = nullcontext().__exit__


class Uncopied:
    """A hook that is `idle` in copies and pickles of its module, which the model's forward may make."""

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return idle

    def __reduce__(self) -> Any:
        return idle.__reduce__()


class _Uncopied(Uncopied, functools.partial[T]):
    pass


def in_this_thread(act: Callable[..., T]) -> Callable[..., T | None]:
    """Restricts a function to the current thread, for hooks on modules that other threads may call at the same time.

    In other threads, and in copies of the module that holds it, the function does nothing."""
    own = threading.get_ident()
    return _Uncopied(
        lambda *args, **kwargs: (
            act(*args, **kwargs) if threading.get_ident() == own else None
        )
    )


# Returns the function with gradients turned off.
without_gradients = torch.no_grad()

# A context in which no function mode sees an operator: in one that observes, each costs a call of Python.
beside_function_modes = torch._C.DisableTorchFunction


def unguarded(act: Callable[..., T], *args: object) -> T:
    """Calls a function without a guard, so that exceptions reach the caller."""
    return act(*args)
