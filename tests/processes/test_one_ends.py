"""A process whose remedies and monitor end after another process has ended, and the store with it."""

from __future__ import annotations

import socket

import pytest
from tests.forked import together


@pytest.mark.timeout(300)
def test_remedies_and_monitor_are_taken_back_after_another_process_has_ended() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    remedy = "lalr:tau=0.1+qk_clip:threshold=1"
    for said in together("tests.processes.one_ends", 2, port, remedy, seconds=200):
        assert said.endswith("well\n"), said
