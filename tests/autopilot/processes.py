"""An autopilot in processes of its own; see spawn."""

import json

import torch
from tests.autopilot.runs import EAGER, RATE, STEPS, Run, adamw, foreign
from torch import distributed, nn

import qkeel
from qkeel.monitor import PlannedRates


def parallel(folder):
    """Each rank trains on its part of the batch; what it decided and has in the end goes to a file."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = foreign()
    model.drop.p = 0.0
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(model)
    planned = PlannedRates.of([RATE] * STEPS)
    pilot = qkeel.autopilot(wrapped, optimizer, policy=EAGER, every=2, planned=planned)
    trained = Run(model, optimizer, pilot)

    def own(batch):
        # The loss is over the whole batch, with one's own part in the place of each: any gradient will do here.
        return wrapped(batch.chunk(world)[rank]).repeat(world, 1, 1)

    trained.train(call=own)
    decisions = [str(decision) for decision in pilot.decisions]
    (folder / f"decisions {rank}").write_text(json.dumps(decisions))
    torch.save(trained.bits(), folder / f"bits {rank}")
    assert pilot.remedies.handles
    pilot.remove()
