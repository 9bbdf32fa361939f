"""One training by a trainer of others, watched and clipped: python -m tests.integrations.trainers.run CASE FOLDER

Under torchrun each process is one of the training's; alone it trains on the global batch.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import qkeel

STEPS, BATCH, TOKENS = 4, 8, 12
CLIP = "qk_clip:threshold=0.02"


@dataclasses.dataclass
class Outcome:
    """What one process holds after a training: weights by name, and what its monitor, if any, recorded."""

    weights: dict[str, Tensor]
    steps: list[int]
    heads: dict[str, np.ndarray]


def rank():
    return int(os.environ.get("RANK", "0"))


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


def outcome(model, monitor):
    history = None if monitor is None else monitor.history
    return Outcome(
        weights={
            name: qkeel.distributed.whole(p).detach().clone()
            for name, p in model.named_parameters()
        },
        steps=[] if history is None else history.steps.tolist(),
        heads={}
        if history is None
        else {name: np.array(values) for name, values in history.heads.items()},
    )


def main(case, folder):
    torch.set_num_threads(1)
    try:
        kind, _, variant = case.partition(".")
        found = importlib.import_module(f"tests.integrations.trainers.{kind}").train(
            variant, folder
        )
    except Exception:
        found = traceback.format_exc()
    name = f"{case}-{rank() if world() > 1 else 'alone'}.pickle"
    (folder / name).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
