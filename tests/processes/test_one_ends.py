"""A process whose remedies and monitor end after another process has ended, and the store with it."""

from __future__ import annotations

import socket

import pytest
from tests.forked import Forked


@pytest.mark.timeout(300)
def test_remedies_and_monitor_are_taken_back_after_another_process_has_ended() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    remedy = "lalr:tau=0.1+qk_clip:threshold=1"
    both = [Forked("tests.processes.one_ends", str(rank), port, remedy) for rank in range(2)]
    try:
        said = [process.communicate(timeout=200)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for process, out in zip(both, said, strict=True):
        assert process.returncode == 0, out
        assert out.endswith("well\n"), out
