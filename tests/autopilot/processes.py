"""An autopilot in processes of its own: python -m tests.autopilot.processes CASE FOLDER [NUMBER NUMBER]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tests.autopilot.runs import EAGER, RATE, STEPS, Run, adamw, foreign
from torch import Tensor, distributed, nn

import qkeel
from qkeel.autopilot import Action
from qkeel.monitor import PlannedRates

PLANNED = PlannedRates.of([RATE] * STEPS)


def parallel(folder: Path, rank: int, world: int) -> None:
    """Each rank trains on its part of the batch; what it decided and has in the end goes to a file."""
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = foreign()
    model.drop.p = 0.0
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(model)
    place = folder / "run" if rank == 0 else ()
    pilot = qkeel.autopilot(
        wrapped, optimizer, policy=EAGER, every=2, planned=PLANNED, sinks=place
    )
    one = Run(model, optimizer, pilot)

    def own(batch: Tensor) -> Tensor:
        return wrapped(batch.chunk(world)[rank]).repeat(world, 1, 1)

    one.train(call=own)
    # The loss is over the whole batch, with one's own part in the place of each: any gradient will do here.
    (folder / f"decisions {rank}").write_text(
        json.dumps([str(d) for d in pilot.decisions])
    )
    torch.save(one.bits(), folder / f"bits {rank}")
    assert pilot.remedies is not None
    assert pilot.remedies.handles
    pilot.remove()
    distributed.destroy_process_group()


def compiled(_folder: Path) -> None:
    """Bits of a compiled training until the first action."""

    def made() -> tuple[nn.Module, nn.Module]:
        torch._dynamo.reset()
        model = foreign()
        return model, torch.compile(model, backend="aot_eager")  # type: ignore[return-value]

    model, call = made()
    plain = Run(model, adamw(model)).train(call=call)
    model, call = made()
    optimizer = adamw(model)
    pilot = qkeel.autopilot(call, optimizer, policy=EAGER, every=2, planned=PLANNED)
    within = Run(model, optimizer, pilot).train(call=call)
    first = next(d.step for d in pilot.decisions if d.action is not Action.WATCH)
    assert within.losses[: first + 3] == plain.losses[: first + 3]
    assert within.losses != plain.losses
    top = pilot.monitor.history.top("max_logit")
    assert top is not None
    assert top[-1] < 60


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, place, *numbers = sys.argv[1:]
    if case == "parallel":
        parallel(Path(place), *map(int, numbers))
    else:
        compiled(Path(place))
