"""The bytes that a measured step exchanges, and a step that needs more of them: RANK WORLD FOLDER."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.contract.processes.ending import end
from tests.contract.processes.watching import Collectives
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qkeel
from qkeel.errors import QkeelWarning

LAYERS, HEADS, WIDTH, TOKENS = 2, 8, 64, 64


class Layer(nn.Module):
    """Attention whose heads see all keys before them; with `apart` the first head sees its own key only."""

    apart = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().repeat(HEADS, 1, 1)
        if Layer.apart:
            visible[0] = torch.eye(x.shape[1], dtype=torch.bool)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def heads(ranks: range, stats: Any, apart_from: int = 9) -> tuple[list[dict[str, list[Any]]], list[int], list[str]]:
    """By measured step the numbers of the heads; the bytes exchanged by each step; the warnings."""
    layers = model()
    one = len(ranks) > 1 or not dist.is_initialized()
    runner = layers if one else DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    found, sizes = [], []
    with warnings.catch_warnings(record=True) as said, qkeel.watch(runner, optimizer, stats=stats, rules=[]) as monitor:
        warnings.simplefilter("always")
        for step in range(4):
            Layer.apart = step >= apart_from
            for rank in ranks:
                runner(batch(step, rank)).square().mean().div(len(ranks)).backward()
            with Collectives() as counted:
                optimizer.step()
            optimizer.zero_grad()
            sizes.append(counted.bytes)
            assert monitor.sample is not None
            values = {name: x.tolist() for name, x in monitor.sample.heads.items()}
            found.append({"step": [monitor.sample.step], **values})
    return found, sizes, [str(w.message) for w in said if isinstance(w.message, QkeelWarning)]


CASES: dict[str, tuple[Any, int]] = {
    "all": (True, 9),
    "max": ("max", 9),
    "unlike heads": (True, 1),
}


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    result = {case: heads(range(rank, rank + 1), *given) for case, given in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    end()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
