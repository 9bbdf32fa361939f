"""What sparse attention chooses, and how much of dense attention it keeps: against plain loops in float64."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sites.sparse_models import DSA, H, M, MoBA, Model, T
from torch import nn

import qkeel


def expected(layer):
    """By head, row by row: every row (there are fewer than 32) that has not chosen all keys before it."""
    hidden = layer.hidden["a"].numpy()
    q, k = (
        layer.double(layer.q_proj, H).numpy(),
        layer.double(layer.k_proj, layer.n_kv_heads).numpy(),
    )
    recalls = [[] for _ in range(H)]
    for b, h, t in np.ndindex(hidden.shape[:3]):
        keys = [s for s in range(t + 1) if not hidden[b, h, t, s]]
        if len(keys) == t + 1:
            continue
        z = [
            float(q[b, h, t] @ k[b, h * k.shape[1] // H, s]) / math.sqrt(q.shape[-1])
            for s in range(t + 1)
        ]
        recalls[h].append(
            math.fsum(math.exp(z[s]) for s in keys) / math.fsum(map(math.exp, z))
        )
    return {
        "dense_recall": np.array([np.mean(values) for values in recalls]),
        "dense_kl": np.array([-np.mean(np.log(values)) for values in recalls]),
    }


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
        index, hidden = model.a.index_truth(), model.a.hidden["a"][:, 0].numpy()
        divergences = []
        q, k = (
            model.a.double(model.a.q_proj, H).numpy(),
            model.a.double(model.a.k_proj, H).numpy(),
        )
        for b, t in np.ndindex(2, T):
            z, others = index[b, t][: t + 1], hidden[b, t][: t + 1]
            if others.any():
                logits = [
                    (q[b, h, t] @ k[b, h, : t + 1].T) / math.sqrt(q.shape[-1])
                    for h in range(H)
                ]
                dense = np.mean([np.exp(x) / np.exp(x).sum() for x in logits], axis=0)
                divergences.append(
                    math.fsum(dense * np.log(dense / (np.exp(z) / np.exp(z).sum())))
                )
        assert heads["index_kl"][0, 0] == pytest.approx(np.mean(divergences), rel=1e-4)


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
