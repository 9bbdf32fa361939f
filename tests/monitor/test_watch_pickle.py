"""A model that is stored whole while it is watched: the file is the one that it would be without qkeel."""

from __future__ import annotations

import copy
import pickle
import pickletools

import torch
from torch import nn

import qkeel


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, batch_first=True),
        1,
        enable_nested_tensor=False,
    )


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(2, 5, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(stored: bytes) -> set[str]:
    return {
        arg
        for _, arg, _ in pickletools.genops(stored)
        if isinstance(arg, str) and "qkeel" in arg
    }


def test_a_watched_model_pickles_to_the_bytes_that_it_has_without_a_watcher() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    before = pickle.dumps(net)
    with qkeel.watch(net, optimizer):
        assert pickle.dumps(net) == before
        step(net, optimizer)
        during, copied = pickle.dumps(net), copy.deepcopy(net)
        optimizer_during = pickle.dumps(optimizer)
    assert pickle.dumps(net) == during
    assert not names(pickle.dumps(copied))
    assert not copied._forward_hooks
    assert pickle.dumps(optimizer) == optimizer_during
    assert "__getstate__" not in vars(net)
