"""The life of a worker process, which ends with that of the process that started it, whatever ends that."""

from __future__ import annotations

import functools
import os
import signal
import threading
from multiprocessing.connection import Connection, Pipe


@functools.cache
def lifeline() -> tuple[Connection, Connection]:
    """A pipe, the end to read from first, that nobody writes to: it is at its end when this process is.

    A worker inherits the first end when it is started, so that no instant is too early, and no system's signal on the
    death of a parent is needed. The other end stays open here as long as this process lives.
    """
    return Pipe(duplex=False)


def begin_worker(line: Connection) -> None:
    """Makes this process a worker: it ends when the line does, and leaves Ctrl-C to its parent.

    Called before anything large is imported: so this module imports nothing large either.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(line,), name="qkeel-lifeline", daemon=True).start()


def _end_with(line: Connection) -> None:
    line.poll(None)  # waits; a pipe at its end can be read
    os._exit(1)
