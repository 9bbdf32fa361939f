"""An autopilot in processes of its own: python -m tests.autopilot.processes FOLDER RANK WORLD."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tests.autopilot.runs import EAGER, RATE, STEPS, Run, adamw, foreign
from torch import Tensor, distributed, nn

import qkeel
from qkeel.monitor import PlannedRates


def parallel(folder: Path, rank: int, world: int) -> None:
    """Each rank trains on its part of the batch; what it decided and has in the end goes to a file."""
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = foreign()
    model.drop.p = 0.0
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(model)
    planned = PlannedRates.of([RATE] * STEPS)
    pilot = qkeel.autopilot(wrapped, optimizer, policy=EAGER, every=2, planned=planned)
    trained = Run(model, optimizer, pilot)

    def own(batch: Tensor) -> Tensor:
        # The loss is over the whole batch, with one's own part in the place of each: any gradient will do here.
        return wrapped(batch.chunk(world)[rank]).repeat(world, 1, 1)

    trained.train(call=own)
    decisions = [str(decision) for decision in pilot.decisions]
    (folder / f"decisions {rank}").write_text(json.dumps(decisions))
    torch.save(trained.bits(), folder / f"bits {rank}")
    assert pilot.remedies.handles
    pilot.remove()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    parallel(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
