"""Exit codes, and the command line as it was typed."""

from __future__ import annotations

import shlex
import sys

OK = 0
FAILED = 1  # a run failed
USAGE = 2  # wrong usage or bad input
COLLAPSED = 3  # with --fail-on-collapse
INTERRUPTED = 130


def command_line() -> str:
    """The command line as typed, quoted for a shell."""
    return shlex.join(["qkeel", *sys.argv[1:]])
