"""One process of two ends, which holds the store."""

import os
import time
import warnings

import torch
from tests.training import adamw
from torch import distributed
from torch.nn import functional as F

import qkeel

STEPS = 3


def end():
    """Ends at once, as a process that is through does, whatever others still do."""
    os._exit(0)


def taken_back(remedy):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    plain = qkeel.nn.Decoder(
        qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4)
    )
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = adamw(model)
    tokens = torch.randint(0, 64, (2, 12))
    with qkeel.watch(model, optimizer, every=2, rules=[]) as monitor:
        with qkeel.apply(model, remedy, optimizer, batch=tokens):
            for _ in range(STEPS):
                F.cross_entropy(
                    model(tokens).flatten(0, 1), tokens.flatten()
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
            if distributed.get_rank() == 0:
                end()
            time.sleep(2)
            begun = time.monotonic()
        assert not optimizer._optimizer_step_pre_hooks or monitor.active
    assert time.monotonic() - begun < 30, "it waited for a process that has ended"
    assert monitor.history.steps.tolist() == [0.0, 2.0]
    end()
