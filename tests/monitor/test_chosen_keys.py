"""What sparse attention chooses, and how much of dense attention it keeps: against plain loops in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from sites.sparse_models import DSA, H, M, MoBA, Model, Sparse, T
from torch import Tensor, nn

import qkeel
from qkeel.capture.calls import ScoresCall, dense_rows
from qkeel.functional.chosen_keys import (
    chosen_distances,
    dense_comparison,
    index_choice,
    index_divergence,
    index_sizes,
    key_coverage,
)
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

NAMES = ("select_share", "select_distance", "select_distance_max", "select_local_share", "dense_recall", "dense_kl")
NAMES += ("dense_kl_max", "dense_top_share", "dense_entropy", "select_coverage")


def expected(layer: Sparse) -> dict[str, np.ndarray]:
    """By head, row by row: every row (there are fewer than 32) that has not chosen all keys before it."""
    hidden = layer.hidden["a"].numpy()
    q, k = layer.double(layer.q_proj, H).numpy(), layer.double(layer.k_proj, layer.n_kv_heads).numpy()
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(H)])
    for b, h, t in np.ndindex(hidden.shape[:3]):
        keys = [s for s in range(t + 1) if not hidden[b, h, t, s]]
        if len(keys) == t + 1:
            continue
        z = [float(q[b, h, t] @ k[b, h * k.shape[1] // H, s]) / math.sqrt(q.shape[-1]) for s in range(t + 1)]
        p = [math.exp(x) / math.fsum(map(math.exp, z)) for x in z]
        recall = math.fsum(p[s] for s in keys)
        nearest = range(t - len(keys) + 1, t + 1)
        values = {
            "select_share": len(keys) / (t + 1),
            "select_distance": sum(t - s for s in keys) / len(keys) / (t + 1),
            "select_distance_max": max(t - s for s in keys) / (t + 1),
            "select_local_share": sum(s in nearest for s in keys) / len(keys),
            "dense_recall": recall,
            "dense_kl": -math.log(recall),
            "dense_kl_max": -math.log(recall),
            "dense_top_share": float(int(np.argmax(z)) in keys),
            "dense_entropy": -math.fsum(x * math.log(x) for x in p),
        }
        for name, value in values.items():
            found[name][h].append(value)
    for b, h in np.ndindex(hidden.shape[:2]):
        free = [t for t in range(T) if hidden[b, h, t, : t + 1].any()]
        taken = {s for t in free for s in range(t + 1) if not hidden[b, h, t, s]}
        found["select_coverage"][h].append(len(taken) / (max(free) + 1))
    return {n: np.array([(max if n.endswith("_max") else np.mean)(v) for v in x]) for n, x in found.items()}


@pytest.mark.parametrize("kind", ["written out", "fused", "blocks"])
def test_the_numbers_are_those_of_plain_loops(kind: str) -> None:
    torch.manual_seed(0)
    model = Model(MoBA() if kind == "blocks" else DSA(fused=kind == "fused"))
    with torch.no_grad():
        model.a.q_proj.weight.mul_(4)
    x = torch.randn(2, T, M)
    heads: Mapping[str, np.ndarray] = {}
    with qkeel.watch(model, stats="all+chosen") as monitor:
        for _ in range(2):
            model(x)
            assert monitor.sample is not None
            heads = monitor.sample.heads
            truth = expected(model.a)
            assert set(truth) == set(NAMES)
            for name, values in truth.items():
                np.testing.assert_allclose(heads[name][0], values, rtol=2e-5, atol=2e-6, err_msg=name)
    assert (heads["dense_recall"] < 1).all()
    assert "recall" in monitor.table()
    if isinstance(model.a, DSA):
        index, hidden = model.a.index_truth(), model.a.hidden["a"][:, 0].numpy()
        margins, masses, divergences = [], [], []
        q, k = model.a.double(model.a.q_proj, H).numpy(), model.a.double(model.a.k_proj, H).numpy()
        for b, t in np.ndindex(2, T):
            z, others = index[b, t][: t + 1], hidden[b, t][: t + 1]
            if others.any():
                margins.append(z[~others].mean() - z[others].mean())
                kept, every = (math.fsum(x for x in one if x > 0) for one in (z[~others], z))
                masses.append(kept / every if every else 0.0)
                logits = [(q[b, h, t] @ k[b, h, : t + 1].T) / math.sqrt(q.shape[-1]) for h in range(H)]
                dense = np.mean([np.exp(x) / np.exp(x).sum() for x in logits], axis=0)
                divergences.append(math.fsum(dense * np.log(dense / (np.exp(z) / np.exp(z).sum()))))
        assert heads["index_margin"][0, 0] == pytest.approx(np.mean(margins), rel=1e-4)
        assert heads["index_top_mass"][0, 0] == pytest.approx(np.mean(masses), rel=1e-4)
        assert heads["index_kl"][0, 0] == pytest.approx(np.mean(divergences), rel=1e-4)
        same_sizes(heads, sizes(model.a, [*np.ndindex(2, T)]))


def sizes(layer: DSA, tokens: list[tuple[int, ...]]) -> dict[str, float]:
    """The sizes of an indexer's queries, keys and weights, one token after the other, in float64."""
    q, k, w = (layer.double(x, 1)[:, 0].numpy() for x in (layer.iq, layer.ik, layer.iw))
    queries = [
        math.sqrt(math.fsum(x * x for x in part)) for at in tokens for part in np.split(q[at], layer.index_heads)
    ]
    keys = [math.sqrt(math.fsum(x * x for x in k[at])) for at in tokens]
    weights = [float(x) for at in tokens for x in w[at]]
    return {
        "index_query_norm": np.mean(queries).item(),
        "index_query_norm_max": max(queries),
        "index_key_norm": np.mean(keys).item(),
        "index_key_norm_max": max(keys),
        "index_weight_mean": np.mean(weights).item(),
        "index_weight_max": max(map(abs, weights)),
        "index_weight_negative": sum(x < 0 for x in weights) / len(weights),
    }


def same_sizes(heads: Mapping[str, np.ndarray], truth: dict[str, float]) -> None:
    found = {name: heads[name][0, 0].item() for name in truth}
    assert found == {name: pytest.approx(x, rel=2e-5, abs=2e-6) for name, x in truth.items()}
    assert all(np.isnan(heads[name][0, 1:]).all() for name in truth)  # one indexer for all heads


@pytest.mark.parametrize("fused", [True, False])
def test_sizes_in_an_indexer_are_those_of_the_tokens_that_count(fused: bool) -> None:
    torch.manual_seed(0)
    layer, x = DSA(fused=fused), torch.randn(2, T, M)
    model = Model(layer)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, 7:] = False
    with qkeel.watch(model, stats="all+chosen", query_mask=mask) as monitor:
        for _ in range(2):
            model(x)
            assert monitor.sample is not None
            same_sizes(monitor.sample.heads, sizes(layer, [*map(tuple, mask.nonzero().tolist())]))


class Two(nn.Module):
    """Two sparse layers; the second has the first one's indexer, or its own."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DSA(fused=True), DSA(fused=True)])
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        return self.layers[1](x if self.same else x + y)


@pytest.mark.parametrize("same", [True, False])
def test_overlap_with_the_layer_before(same: bool) -> None:
    torch.manual_seed(0)
    model = Two(same)
    if same:
        model.layers[1].load_state_dict(model.layers[0].state_dict())
    with qkeel.watch(model, stats="max+chosen") as monitor:
        model(torch.randn(2, T, M))
    assert monitor.sample is not None
    overlap = monitor.sample.heads["select_overlap"]
    one, two = (~layer.hidden["a"] for layer in model.layers)  # type: ignore[union-attr, operator]
    shares = ((one & two).sum(-1) / (one | two).sum(-1))[..., 5:]  # earlier rows have nothing to choose
    assert np.isnan(overlap[0]).all()
    np.testing.assert_allclose(overlap[1], shares.mean((0, 2)), rtol=1e-5)
    assert (overlap[1] == 1).all() == same


def test_dense_layers_and_the_other_statistics_are_as_without() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(M, M), qkeel.nn.Attention(M, H)), torch.randn(2, T, M)
    found = []
    for stats in ("all", "all+chosen"):
        with qkeel.watch(model, stats=stats) as monitor:
            model(x)
        assert monitor.sample is not None
        found.append(monitor.sample.heads)
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(found[0][name], found[1][name], equal_nan=True) for name in found[0])


def test_what_is_no_product_alone_is_left_out() -> None:
    q, k = torch.randn(2, 1, 2, 6, 4).unbind()
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    mask[..., 4, 1] = 0.5
    found = dense_rows(make_call(AttentionSpec(), q, k, k, causal=False, mask=mask), slice(0, 6))
    assert found is not None
    assert found[2].tolist() == [[[True] * 4 + [False, True]] * 2]
    z = q @ k.mT / 2
    call = ScoresCall(spec=AttentionSpec(), logits=z + mask.clamp_min(0), capped=z, hidden=mask < 0, q=q, k=k)
    found = dense_rows(call, slice(0, 6))
    assert found is not None
    assert found[2].tolist() == [[[True] * 4 + [False, True]] * 2]
    assert dense_rows(make_call(AttentionSpec(), q, k[:, :, :5], k[:, :, :5], causal=False), slice(0, 6)) is None


def test_worked_by_hand() -> None:
    """Four keys with p = (1, 2, 3, 4) / 10, of which the query at place 3 chooses the first and the last."""
    z = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()[None, None, None]
    allowed, chosen = torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.tensor([[[[True, False, False, True]]]])
    values = {**dense_comparison(z, chosen, allowed), **chosen_distances(chosen, allowed, torch.tensor([3]))}
    assert {name: pytest.approx(x.item()) for name, x in values.items()} == {
        "dense_recall": 0.5,
        "dense_kl": math.log(2),
        "dense_top_share": 1.0,
        "dense_entropy": -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4)),
        "select_share": 0.5,
        "select_distance": 1.5 / 4,
        "select_distance_max": 0.75,
        "select_local_share": 0.5,
    }
    some = torch.tensor([[[[True, False, False, False], [True, False, True, False]]]])
    below = torch.tensor([[[[True, True, False, False], [True, True, True, False]]]])
    assert key_coverage(some, below).item() == pytest.approx(2 / 3)
    found = index_choice(torch.tensor([[[[2.0, -4.0, 1.0, 3.0]]]]), chosen, allowed)
    assert {name: x.item() for name, x in found.items()} == {
        "index_margin": (2 + 3) / 2 - (1 - 4) / 2,
        "index_top_mass": pytest.approx(5 / 6),
    }
    assert index_choice(-z.exp(), chosen, allowed)["index_top_mass"].item() == 0  # no score is positive
    same = index_divergence(z + 3.0, z.expand(1, 2, 1, 4), allowed)
    assert same.item() == pytest.approx(0, abs=1e-6)
    other = index_divergence(torch.zeros(1, 1, 1, 4), z, allowed)
    assert other.item() == pytest.approx(sum(p * math.log(4 * p) for p in (0.1, 0.2, 0.3, 0.4)))
    one = index_sizes(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, -2.0]]), torch.tensor([-0.5]))
    assert [*one] == [
        *("index_query_norm", "index_key_norm", "index_weight_mean", "index_weight_max", "index_weight_negative")
    ]
    assert [x.item() for x in one.values()] == [5, 2, -0.5, 0.5, 1]
