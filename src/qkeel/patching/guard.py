"""The guard around everything that is called while somebody trains: what fails in it reaches nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

from qkeel.errors import QkeelError, caution

T = TypeVar("T")
Guarded = Callable[..., Any]  # called as guard(function, *arguments)


@final
class Guard:
    """Calls functions so that no exception of theirs reaches the caller.

    The first is kept in `error`, one warning tells of it, and each function of `off` is called, to switch off what
    failed. Later ones are dropped: it was said that nothing more is measured. Interrupts (KeyboardInterrupt,
    SystemExit) are no faults and pass.

    >>> guard = Guard("the watcher is off: {}")
    >>> guard(int, "7")
    7
    """

    def __init__(self, words: str, *off: Callable[[], None]) -> None:
        """`words`: of the warning, with {} in place of what went wrong."""
        self.words, self.off = words, list(off)
        self.error: Exception | None = None

    def __call__(self, act: Callable[..., T], *args: object) -> T | None:
        try:
            return act(*args)
        except Exception as error:
            if self.error is None:
                self._report(error)
            return None

    def _report(self, error: Exception) -> None:
        try:
            text = str(error) if isinstance(error, QkeelError) else f"{type(error).__name__}: {error}"
            caution(self.words.format(text))
        except Exception:  # the stack or the memory is still full: the next fault is reported
            return
        self.error = error
        for act in self.off:
            self(act)


@final
class Postponed:
    """A guard that keeps the first exception for `settle`: what it is raised in goes on as if nothing had been asked,
    since other processes wait for it."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, act: Callable[..., T], *args: object) -> T | None:
        try:
            return act(*args)
        except Exception as error:
            self.error = self.error or error
            return None

    def settle(self) -> None:
        """Raises what was kept."""
        if self.error is not None:
            raise self.error


def in_this_thread(act: Callable[..., T]) -> Callable[..., T | None]:
    """The function in the thread that runs now; in any other nothing. For hooks of a pass on modules that other threads
    may call meanwhile."""
    own = threading.get_ident()
    return lambda *args, **kwargs: act(*args, **kwargs) if threading.get_ident() == own else None


def unguarded(act: Callable[..., T], *args: object) -> T:
    """Calls a function; what it raises reaches the caller, who asked for the answer."""
    return act(*args)
