"""The process that workers are forked from; it is imported without torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing import forkserver


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """A context in which workers are forked from a process that has imported what they need, while this one does.

    That process computes nothing and has no threads, so that it can be forked.
    """
    try:
        from joblib.externals.loky.backend.context import get_start_method, set_start_method
    except ImportError:
        yield
        return
    before = get_start_method()
    if sys.platform == "linux" and before is None:
        multiprocessing.set_forkserver_preload(["qkeel.lab.execution.workers", "torch._dynamo"])
        forkserver.ensure_running()
        set_start_method("forkserver")
    try:
        yield
    finally:
        set_start_method(before, force=True)
