"""The weights of modules that fully_shard has split: gathered for a while, and split again afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


def _sharded_modules(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


@contextmanager
def split_as_before(model: nn.Module) -> Iterator[None]:
    """What passes in it gather, where weights are kept after a pass, is split again after it."""
    modules = _sharded_modules(model)
    before = {id(p) for p in model.parameters()} if modules else set()
    try:
        yield
    finally:
        if modules and before != {id(p) for p in model.parameters()}:
            for module in modules:
                module.reshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """The weights are whole, under their names, from the first pass in it until its end; all processes do the same."""
    with ExitStack() as undo:
        for module in _sharded_modules(model):
            undo.callback(module.reshard)
            state = module._get_fsdp_state()
            undo.callback(setattr, state, "_auto_reshard_after_forward", state._auto_reshard_after_forward)
            for group in state._fsdp_param_groups:
                undo.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
            module.set_reshard_after_forward(False, recurse=False)
        yield
