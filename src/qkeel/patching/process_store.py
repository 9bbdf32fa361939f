"""The store at which the processes of torch.distributed met, which a silent process cannot block."""

from __future__ import annotations

from torch import distributed


def process_store() -> distributed.Store:
    """The store of the default process group: keys and values that all of its processes read and write."""
    return distributed.distributed_c10d._get_default_store()
