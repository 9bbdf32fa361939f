"""One process of two ends: python -m tests.processes.one_ends RANK PORT CASE; process 0 holds the store."""

from __future__ import annotations

import os
import sys
import time
import warnings
from datetime import timedelta
from typing import NoReturn

import torch
from torch import distributed
from torch.nn import functional as F

import qkeel

STEPS = 3


def end(word: str) -> NoReturn:
    """Ends at once, as a process that is through does, whatever others still do."""
    print(word, flush=True)
    os._exit(0)


def main(rank: int, port: str, remedy: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    at = f"tcp://localhost:{port}"
    distributed.init_process_group(
        "gloo", at, timedelta(seconds=60), world_size=2, rank=rank
    )
    torch.manual_seed(0)
    plain = qkeel.nn.Decoder(
        qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4)
    )
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (2, 12))
    with qkeel.watch(model, optimizer, every=2, rules=[]) as monitor:
        with qkeel.apply(model, remedy, optimizer, batch=tokens):
            for _ in range(STEPS):
                F.cross_entropy(
                    model(tokens).flatten(0, 1), tokens.flatten()
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                end("well")
            time.sleep(2)
            begun = time.monotonic()
        assert not optimizer._optimizer_step_pre_hooks or monitor.active
    assert time.monotonic() - begun < 30, "it waited for a process that has ended"
    assert monitor.history.steps.tolist() == [0.0, 2.0]
    print(remedy, "taken back", f"{time.monotonic() - begun:.1f}", flush=True)
    end("well")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
