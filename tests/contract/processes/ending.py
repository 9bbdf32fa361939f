"""The end of a process of a test."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from torch import distributed


def end(word: str = "") -> NoReturn:
    """Leaves the process group, says a word and ends the process, without the interpreter's own end.

    gloo's threads go on behind destroy_process_group where DistributedDataParallel or fully_shard was used. One that
    lets go of a tensor while the interpreter ends aborts the process ("terminate called without an active exception").
    """
    distributed.destroy_process_group()
    if word:
        print(word)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
