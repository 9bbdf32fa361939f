"""What sparse attention chooses, and how much of dense attention it keeps: against plain loops in float64."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sites.sparse_models import DSA, H, M, MoBA, Model, T
from torch import nn

import qkeel


def expected(layer):
    """By head, row by row: every row (there are fewer than 32) that has not chosen all keys before it."""
    weights, hidden = np.exp(layer.dense()), layer.hidden.numpy()
    recalls = [[] for _ in range(H)]
    for b, h, t in np.ndindex(hidden.shape[:3]):
        row, left_out = weights[b, h, t, : t + 1], hidden[b, h, t, : t + 1]
        if left_out.any():
            recalls[h].append(row[~left_out].sum() / row.sum())
    return {
        "dense_recall": np.array([np.mean(values) for values in recalls]),
        "dense_kl": np.array([-np.mean(np.log(values)) for values in recalls]),
    }


def index_kl(layer):
    """The mean divergence of the index's weights from those of dense attention, over rows that leave a key out."""
    weights, index = np.exp(layer.dense()), np.exp(layer.index_truth())
    hidden, divergences = layer.hidden[:, 0].numpy(), []
    for b, t in np.ndindex(hidden.shape[:2]):
        if hidden[b, t, : t + 1].any():
            rows, chosen = weights[b, :, t, : t + 1], index[b, t, : t + 1]
            dense = (rows / rows.sum(-1, keepdims=True)).mean(0)
            divergences.append(dense @ np.log(dense / (chosen / chosen.sum())))
    return np.mean(divergences)


@pytest.mark.parametrize("kind", ["written out", "fused", "blocks"])
def test_the_numbers_are_those_of_plain_loops(kind):
    torch.manual_seed(0)
    model = Model(MoBA() if kind == "blocks" else DSA(fused=kind == "fused"))
    with torch.no_grad():
        model.a.q_proj.weight.mul_(4)
    x = torch.randn(2, T, M)
    heads = {}
    with qkeel.watch(model, stats="all+chosen") as monitor:
        for _ in range(2):
            model(x)
            heads = monitor.sample.heads
            for name, values in expected(model.a).items():
                assert_allclose(
                    heads[name][0], values, rtol=2e-5, atol=2e-6, err_msg=name
                )
    assert (heads["dense_recall"] < 1).all()
    assert "recall" in monitor.table()
    if isinstance(model.a, DSA):
        kl = heads["index_kl"][0, 0]
        assert kl == pytest.approx(index_kl(model.a), rel=1e-4)


def test_dense_layers_and_the_other_statistics_are_as_without():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(M, M), qkeel.nn.Attention(M, H)),
        torch.randn(2, T, M),
    )
    found = []
    for stats in ("all", "all+chosen"):
        with qkeel.watch(model, stats=stats) as monitor:
            model(x)
        found.append(monitor.sample.heads)
    assert found[0].keys() == found[1].keys()
    assert all(
        np.array_equal(found[0][name], found[1][name], equal_nan=True)
        for name in found[0]
    )
