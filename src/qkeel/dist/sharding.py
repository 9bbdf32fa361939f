"""Parameters that are split over processes, and how."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from qkeel.dist.world import on


def splits_heads(model: nn.Module) -> bool:
    """Returns whether weights are split over processes for good, as tensor parallelism does.

    Sharded data parallelism (fully_shard) splits them too, once, and gathers them for each pass.
    """
    if not on():
        return False
    once = {id(p) for m in model.modules() if _is(m, _FSDP) for p in m.parameters()}
    return any(
        _is(p, _DTENSOR) and sum(not x.is_replicate() for x in p.placements) > (id(p) in once)  # type: ignore[attr-defined]
        for p in model.parameters()
    )


def sharded(model: nn.Module) -> bool:
    """Returns whether fully_shard was applied to it or a part of it."""
    return any(_is(m, _FSDP) for m in model.modules())


def is_split(x: Tensor) -> bool:
    """Returns whether a tensor is one of which each process holds a part, or a replica of it (a DTensor)."""
    return _is(x, _DTENSOR)


def fully_sharded(model: nn.Module) -> dict[int, int]:
    """The ids of the parameters that fully_shard gathers for each pass -> how many axes of their mesh are its own."""
    found = {}
    for module in model.modules():
        for p in module.parameters() if _is(module, _FSDP) else ():
            # Its own come first: one that replicates and one that splits (HSDP), or one that splits.
            found[id(p)] = 2 if is_split(p) and p.placements[0].is_replicate() else 1  # type: ignore[attr-defined]
    return found


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor that is split over processes; any other as it is."""
    return x.full_tensor() if _is(x, _DTENSOR) else x  # type: ignore[attr-defined]


# Both take half as long to import as all of torch, and where nobody has imported them nothing is of their kind.
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_DTENSOR = ("torch.distributed.tensor", "DTensor")


def _is(value: object, kind: tuple[str, str]) -> bool:
    module = sys.modules.get(kind[0])
    return module is not None and isinstance(value, vars(module)[kind[1]])
