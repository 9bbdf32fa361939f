"""The residual stream as the processes of a setup record it: python -m tests.processes.streams RANK FOLDER SETUP…"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from tests.contract.processes.wrapped import llama, part, wrapped
from torch import Tensor, nn
from torch import distributed as dist

import qkeel
from qkeel.records import BLOCK_FIELDS


def measured(model: nn.Module, batches: list[Tensor]) -> dict[str, float]:
    """The numbers of the blocks of one step of these micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.watch(model, optimizer, stats="max+residual", rules=()) as monitor:
        for tokens in batches:
            model(input_ids=tokens).logits.square().mean().backward()
        optimizer.step()
        sample = monitor.sample
    assert sample is not None
    return {
        name: x
        for name, x in sample.values.items()
        if name.partition("/")[0] in BLOCK_FIELDS
    }


def main(rank: int, folder: Path, setups: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=rank)
    for setup in setups:
        tokens = part(setup, 0)
        found = measured(wrapped(llama(), setup), [tokens])
        (folder / f"{setup}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
