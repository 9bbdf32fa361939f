"""Processes of which one attends more, or not at all, in some steps; see spawn."""

import json
import warnings

import torch
from tests.contract.processes.watching import Collectives
from tests.training import sgd
from torch import distributed as dist
from torch import nn

import qkeel
from qkeel.distributed.agree import OwnGroup

PASSES = {
    0: (2, 2, 2),
    1: (3, 0, 2),
}  # by process, how often its attention is called in each step


class Model(nn.Module):
    """Two attentions, which may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = qkeel.nn.Attention(8, 2), qkeel.nn.Attention(8, 2)

    def forward(self, x, attends):
        return self.second(self.first(x)) if attends else x


def trained(folder):
    """Each process leaves what its monitor recorded of itself in a file."""
    warnings.simplefilter("ignore")  # that a pass made no attention call is said once
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    optimizer = sgd(model, 0.0)
    found = []
    reductions = []
    reduce_ = OwnGroup.reduce_

    def noted(self, vector, by):
        reductions.append(by)
        assert vector.dtype == torch.float64
        reduce_(self, vector, by)

    OwnGroup.reduce_ = noted
    with qkeel.watch(model, optimizer, stats="max", rules=()) as monitor:
        for n in PASSES[rank]:
            for _ in range(max(1, n)):
                x = torch.randn(1, 4, 8, requires_grad=True)
                model(x, n > 0).sum().backward()
            reductions.clear()
            with Collectives() as counted:
                optimizer.step()
            assert monitor.sample is not None
            counts = {"collectives": counted.n, "vectors": len(reductions)}
            found.append({"own": dict(monitor.sample.monitor), **counts})
    (folder / f"{rank}.json").write_text(json.dumps(found))
