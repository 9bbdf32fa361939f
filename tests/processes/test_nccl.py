"""A watched model under NCCL: one process, so one GPU is enough. The monitor's own group is gloo's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed

import qkeel
from qkeel.distributed.agree import OwnGroup, gather_messages


@pytest.mark.gpu
def test_a_model_is_watched_under_nccl(tmp_path: object) -> None:
    if not (torch.cuda.is_available() and distributed.is_nccl_available()):
        pytest.skip("needs a GPU and NCCL")
    distributed.init_process_group(
        "nccl", f"file://{tmp_path}/store", world_size=1, rank=0
    )
    try:
        torch.manual_seed(0)
        config = qkeel.nn.DecoderConfig(
            vocab_size=64, d_model=32, n_layers=2, n_heads=4
        )
        inner = qkeel.nn.Decoder(config).cuda()
        model = torch.nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, 64, (2, 16), device="cuda")
        with qkeel.watch(model, optimizer, rules=[]) as monitor:
            with qkeel.apply(
                model, "qk_clip:threshold=1+lalr:tau=0.1", optimizer, batch=tokens
            ):
                for _ in range(3):
                    model(tokens).logsumexp(-1).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert monitor.sample is not None
            assert math.isfinite(monitor.sample.overall("max_logit"))
            assert len(monitor.history) == 3
        group = OwnGroup("smoke")
        vector = torch.tensor([1.0, -2.0], dtype=torch.float64)
        group.reduce_(vector, "max")
        assert vector.tolist() == [1.0, -2.0]
        assert gather_messages("a test", "here") == ["here"]
    finally:
        distributed.destroy_process_group()
