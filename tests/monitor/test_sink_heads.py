"""The share of a model's heads that are sinks."""

import numpy as np
import torch

import qkeel
from qkeel.records import SINK_HEAD


def test_the_whole_models_share_is_over_heads_and_not_over_layers():
    torch.manual_seed(0)
    config = qkeel.nn.DecoderConfig(vocab_size=20, n_layers=2, n_heads=4)
    model = qkeel.nn.Decoder(config)
    # Spiky attention gives the first of a few keys more than its share in some heads.
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight *= 30
    with qkeel.watch(model) as monitor:
        model(torch.randint(0, 20, (2, 3)))
        sample = monitor.sample
    shares = sample.heads["sink_share"]
    expected = (shares > SINK_HEAD).mean()
    assert 0 < expected < 1
    assert sample.overall("sink_head_ratio") == expected
    found = sample.summaries()
    assert found["attn/sink_head_ratio"] == expected
    assert found["attn/layer_01/sink_head_ratio"] == (shares[1] > SINK_HEAD).mean()
    assert "sink heads" in monitor.table()
    assert np.isin(sample.heads["sink_head_ratio"], (0, 1)).all()
