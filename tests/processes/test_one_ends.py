"""A process whose remedies and monitor end after another process has ended, and the store with it."""

import functools
import socket

import pytest
from tests.forked import spawn

from .one_ends import taken_back


@pytest.mark.timeout(300)
def test_remedies_and_monitor_are_taken_back_after_another_process_has_ended():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    act = functools.partial(taken_back, "lalr:tau=0.1+qk_clip:threshold=1")
    spawn(2, act, store=f"tcp://localhost:{port}")
