"""Watched and remedied models under NCCL. One process, so one GPU is enough: the monitor's own group is gloo's."""

import math

import pytest
import torch
from torch import distributed, nn

import qkeel
from qkeel.distributed.agree import OwnGroup, gather_messages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and distributed.is_nccl_available()),
        reason="needs a GPU and NCCL",
    ),
]


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "nccl", f"file://{tmp_path}/store", world_size=1, rank=0
    )
    yield
    distributed.destroy_process_group()


def replicated(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def losses(wrapped, wrap, watched):
    torch.manual_seed(0)
    config = qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4)
    model = qkeel.nn.Decoder(config).cuda()
    model = wrap(model) if wrapped else model  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (2, 16), device="cuda")
    monitor = qkeel.watch(model, optimizer, rules=[]) if watched else None
    kept = []
    for _ in range(3):
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.item())
    if monitor is not None:
        assert monitor.sample is not None
        assert math.isfinite(monitor.sample.overall("max_logit"))
        assert len(monitor.history) == 3
        monitor.remove()
    return kept


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [replicated, sharded])
def test_a_watched_model_trains_as_one_that_nobody_watches(wrap):
    assert losses(True, wrap, True) == losses(True, wrap, False)


@pytest.mark.usefixtures("group")
def test_step_remedies_run_and_our_own_group_reduces():
    torch.manual_seed(0)
    config = qkeel.nn.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4)
    model = replicated(qkeel.nn.Decoder(config).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (2, 16), device="cuda")
    remedy = "qk_clip:threshold=1+lalr:tau=0.1"
    with qkeel.apply(model, remedy, optimizer, batch=tokens):
        for _ in range(3):
            model(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    own = OwnGroup("smoke")
    vector = torch.tensor([1.0, -2.0], dtype=torch.float64)
    own.reduce_(vector, "max")
    assert vector.tolist() == [1.0, -2.0]
    assert gather_messages("a test", "here") == ["here"]
