"""The process of a compiler, which ends with this one, whatever ends that."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

# A shell in a process group of its own runs the command, and next to it a process that waits for the end of standard
# input: a pipe that ends with the Python process, by kill -9 too. Then it kills the group. A compiler starts others
# that do the work, so to kill it alone would not end them.
_GUARDED = (
    'exec 3<&0 </dev/null; (read -r _ <&3; kill -9 0) >/dev/null 2>&1 & "$@" 3<&-; code=$?; kill -9 $!; exit $code'
)


def run_compiler(
    command: Sequence[str], *, timeout: float, folder: str, environment: Mapping[str, str], keep_open: Sequence[int]
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its exit code and output; no process of it outlives this one.

    Args:
        command: the compiler and its options.
        timeout: seconds after which it is ended.
        folder: where it runs.
        environment: its variables.
        keep_open: descriptors that it inherits.

    Raises: subprocess.TimeoutExpired after `timeout`.
    """
    reading, writing = os.pipe()
    try:
        return subprocess.run(
            ["/bin/sh", "-c", _GUARDED, "sh", *command],
            stdin=reading,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=folder,
            env=environment,
            pass_fds=tuple(keep_open),
            process_group=0,
        )
    finally:
        os.close(reading)
        os.close(writing)
