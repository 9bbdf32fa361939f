"""Step remedies read nothing back to the host: on a GPU that would make it wait for all work under way."""

import pytest
import torch
from tests.training import adamw, sgd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel
from qkeel.remedies import qk_clip

# Their results depend on numbers, in value or in shape, so the host must have those.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "allclose",
}


class NoReads(TorchDispatchMode):
    """Raises on every operator that reads numbers, counts the others."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        assert name not in READS, f"{func} reads a number on the host"
        assert not by_mask, f"{func} by a mask: its shape depends on numbers"
        self.count += 1
        return func(*args, **(kwargs or {}))


def model_of(layers):
    return nn.Sequential(*(qkeel.nn.Attention(16, 4, 2) for _ in range(layers)))


def steps(remedy, layers, optimizer="fused"):
    """Operators of one optimizer step after two others."""
    model, x = model_of(layers), torch.randn(2, 5, 16)
    made = {
        "fused": lambda: adamw(model, 0.01, fused=True),
        "sgd": lambda: sgd(model, 0.01, momentum=0.9, foreach=True),
    }[optimizer]()
    handle = qkeel.apply(model, remedy, made) if remedy != "none" else None
    mode = NoReads()
    for step in range(3):
        made.zero_grad()
        if step < 2:
            model(x).square().sum().backward()
            made.step()
            continue
        with mode:
            loss = model(x).square().sum()
        loss.backward()
        mode.count = 0
        with mode:
            made.step()
    if handle is not None:
        handle.remove()
    return mode.count


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(qk_clip, "_readable", lambda tensor: False)


CLIPS = ["qk_clip:threshold=0.001", "qk_clip:threshold=0.001,steps=matched"]
REMEDIES = ["lalr", "qk_lr:factor=0.5", "qk_weight_decay", *CLIPS]


@pytest.mark.parametrize("optimizer", ["fused", "sgd"])
@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_step_and_the_forward_before_it_read_nothing(remedy, optimizer):
    assert steps(remedy, 2, optimizer) > 0


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_weight_costs_a_few_operators_a_step_and_a_head_none(remedy):
    few, many = (steps(remedy, layers) - steps("none", layers) for layers in (2, 6))
    assert few > 0
    assert (many - few) / (4 * 2) <= 16  # of each of two weights, views counted too
