"""The layer over torch.distributed: which processes run this model, and one packed gather among them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed

from qkeel.patching.process_store import process_store

Verdict = Literal["together", "apart", "alone"]


def world() -> int:
    """The number of processes that train one model; 1 where torch.distributed is not in use."""
    return torch_distributed.get_world_size() if _on() else 1


def rank() -> int:
    """This process's number among them."""
    return torch_distributed.get_rank() if _on() else 0


def gather(vector: Tensor) -> Tensor:
    """[n] on every process -> [world n] on each, in the order of ranks, by one collective."""
    if not _on():
        return vector[None]
    out = vector.new_empty(world() * vector.numel())
    # torch 2.13 renamed it and warns of the old name.
    all_gather = getattr(torch_distributed, "all_gather_single", torch_distributed.all_gather_into_tensor)
    all_gather(out, vector.contiguous())
    return out.view(world(), -1)


def agree(name: str, word: str, patience: float = 60.0) -> Verdict:
    """Returns whether all processes say the same word under this name, the same answer on each.

    "apart" if the words differ; "alone" if some process says none within `patience` seconds. Goes through the store
    that the processes met at and not through a collective, which would wait for a silent process for ever.
    """
    if not _on():
        return "together"
    store = process_store()
    keys = [f"qkeel/{name}/{other}" for other in range(world())]
    store.set(keys[rank()], word)
    try:
        store.wait(keys, timedelta(seconds=patience))
        verdict = _same([store.get(key).decode() for key in keys])
    except RuntimeError:  # each kind of store has its own error
        verdict = "alone"
    # The first verdict is everyone's: one process may just have lost patience with another that was about to speak.
    final = store.compare_set(f"qkeel/{name}/verdict", "", verdict).decode()
    return next(v for v in ("together", "apart", "alone") if v == final)


def _same(words: Sequence[str]) -> Verdict:
    return "together" if len(set(words)) == 1 else "apart"


def ordinal(kind: str) -> int:
    """The count of this process's requests of this kind; the same thing gets the same one everywhere."""
    if not _on():
        return 0
    return process_store().add(f"qkeel/{kind}/{rank()}", 1)


def collective_device() -> torch.device:
    """The device that tensors must be on to be gathered: the GPU for NCCL, else the CPU."""
    if _on() and torch_distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def splits_heads(model: nn.Module) -> bool:
    """Returns whether weights are split over processes for good, as tensor parallelism does.

    Sharded data parallelism (fully_shard) splits them too, once, and gathers them for each pass.
    """
    if not _on():
        return False
    once = {id(p) for m in model.modules() if _is(m, _FSDP) for p in m.parameters()}
    return any(
        _is(p, _DTENSOR) and sum(not x.is_replicate() for x in p.placements) > (id(p) in once)  # type: ignore[attr-defined]
        for p in model.parameters()
    )


def sharded(model: nn.Module) -> bool:
    """Returns whether fully_shard was applied to it or a part of it."""
    return any(_is(m, _FSDP) for m in model.modules())


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor that is split over processes; any other as it is."""
    return x.full_tensor() if _is(x, _DTENSOR) else x  # type: ignore[attr-defined]


# Both take half as long to import as all of torch, and where nobody has imported them nothing is of their kind.
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_DTENSOR = ("torch.distributed.tensor", "DTensor")


def _is(value: object, kind: tuple[str, str]) -> bool:
    module = sys.modules.get(kind[0])
    return module is not None and isinstance(value, vars(module)[kind[1]])


def _on() -> bool:
    return torch_distributed.is_available() and torch_distributed.is_initialized()
