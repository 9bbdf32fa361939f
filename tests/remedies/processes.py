"""What two processes do that clip together: python -m tests.remedies.processes RANK STORE."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.remedies.families import FAMILIES, batch, run
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qkeel
from qkeel.errors import RefusedError

REMEDY = "lalr:tau=0.3+qk_clip:threshold=0.5"


def train(model: nn.Module, part: slice) -> list[Tensor]:
    """Three steps of SGD under both remedies, on a part of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with qkeel.apply(REMEDY, model, optimizer, example=batch()):
        for step in range(3):
            optimizer.zero_grad()
            run(model, batch(step)[part]).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def main(rank: int, store: str) -> None:
    """Two replicas end as one process with both parts of the batch does; unlike sites are refused on both."""
    alone = train(FAMILIES["gpt2"].model(), slice(None))
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = train(DistributedDataParallel(FAMILIES["gpt2"].model()), slice(rank, rank + 1))
    for a, b in zip(alone, mine, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
        everyones = [torch.empty_like(b) for _ in range(2)]
        distributed.all_gather(everyones, b.contiguous())
        assert torch.equal(*everyones)
    model = FAMILIES[["gpt2", "llama"][rank]].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(RefusedError, match="those of this run hold different attention"):
        qkeel.apply("qk_clip", model, optimizer, example=batch())
    assert not optimizer._optimizer_step_post_hooks
    distributed.destroy_process_group()
    print("well")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
