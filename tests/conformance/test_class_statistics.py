"""Statistics split by token classes are those of a straightforward T×T recomputation, for every spec and mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

from qkeel.capture.calls import ScoresCall, scores_stats
from qkeel.functional.class_statistics import (
    TENSORS,
    ClassStats,
    TokenClasses,
    merge_classes,
)
from qkeel.kernels import statistics
from qkeel.kernels.statistics import logit_stats
from qkeel.reference import attend_call
from qkeel.spec import AttentionCall
from qkeel.spec.call import with_query_mask

from .cases import GEOMETRIES, MASKS, SOME, SPECS, calls, pairs, share
from .test_scores_statistics import SOFT, by_hand

ALL = pairs(GEOMETRIES, MASKS)
NAMES = ("text", "image", "sound")


def classed(call: AttentionCall, seed: int, *, alike: bool = False) -> AttentionCall:
    """Random classes; some tokens are of none."""
    rng = torch.Generator().manual_seed(seed)
    (b, t), s = call.query_shape, call.k.shape[2]
    rows = 1 if alike else b
    query, key = (torch.randint(-1, 3, (rows, n), generator=rng) for n in (t, s))
    return dataclasses.replace(
        call, classes=TokenClasses(names=NAMES, query=query, key=key)
    )


def recomputed(call: AttentionCall) -> dict[str, Tensor]:
    """Every field from the oracle's T×T matrices, pair of classes by pair of classes."""
    assert call.classes is not None
    truth, (q, k) = attend_call(call), call.encoded()
    b, h, t, s = truth.logits.shape
    visible = truth.logits > -torch.inf
    if call.query_mask is not None:
        visible = visible & call.query_mask[:, None, :, None]
    p = truth.weights / truth.weights.sum(-1, keepdim=True).clamp_min(1e-300)
    q_class, k_class = call.classes.query.expand(b, t), call.classes.key.expand(b, s)
    per_group = h // k.shape[1]
    found: dict[str, Tensor] = {}

    def put(
        name: str, at: tuple[int, ...], value: Tensor, shape: tuple[int, ...]
    ) -> None:
        found.setdefault(name, torch.zeros(shape, dtype=value.dtype))[at] = value

    for head in range(h):
        rows = visible[:, head].any(-1)
        for i in range(3):
            of = rows & (q_class == i)
            norms = q[:, head].norm(dim=-1)[of]
            put("query_norm", (head, i), _mean(norms), (h, 3))
            put(
                "query_norm_max",
                (head, i),
                norms.amax() if len(norms) else norms.sum(),
                (h, 3),
            )
            for name in ("n_queries", "n_normed"):
                put(name, (head, i), of.sum(), (h, 3))
            for j in range(3):
                pair = visible[:, head] & of[..., None] & (k_class == j)[:, None]
                z = truth.logits[:, head][pair]
                put(
                    "max_logit",
                    (head, i, j),
                    z.amax() if len(z) else z.new_tensor(-torch.inf),
                    (h, 3, 3),
                )
                put("n_pairs", (head, i, j), pair.sum(), (h, 3, 3))
                mass = (p[:, head] * (k_class == j)[:, None]).sum(-1)[of]
                put("mass", (head, i, j), _mean(mass), (h, 3, 3))
                seen = visible[:, head] & (k_class == j)[:, None]
                share = seen.sum(-1)[of] / visible[:, head].sum(-1)[of].to(z.dtype)
                put("uniform_mass", (head, i, j), _mean(share), (h, 3, 3))
    for group in range(k.shape[1]):
        seen = visible[:, group * per_group : (group + 1) * per_group].any(1).any(1)
        for j in range(3):
            norms = k[:, group].norm(dim=-1)[seen & (k_class == j)]
            put("key_norm", (group, j), _mean(norms), (k.shape[1], 3))
            put(
                "key_norm_max",
                (group, j),
                norms.amax() if len(norms) else norms.sum(),
                (k.shape[1], 3),
            )
            put("n_keys", (group, j), torch.tensor(len(norms)), (k.shape[1], 3))
    return found


def _mean(x: Tensor) -> Tensor:
    return x.mean() if len(x) else x.sum()


def assert_same(
    ours: ClassStats | None,
    theirs: dict[str, Tensor],
    case: str,
    tolerance: float = 1e-11,
) -> None:
    assert ours is not None
    assert set(theirs) == set(TENSORS)
    for name, truth in theirs.items():
        torch.testing.assert_close(
            getattr(ours, name),
            truth,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}, {case}: {m}",
        )


def taken_apart(stats: ClassStats) -> dict[str, Tensor]:
    return {name: getattr(stats, name) for name in TENSORS}


@pytest.mark.parametrize("name", one_in(SPECS, 4))
def test_they_are_those_of_the_whole_matrix_in_float64(name: str) -> None:
    for i, (case, call) in enumerate(
        calls(SPECS[name], torch.float64, share(name, 2), seed=5)
    ):
        split = classed(call, i, alike=i % 2 == 0)
        assert_same(logit_stats(split).classes, recomputed(split), case)


def test_so_they_are_for_every_geometry_and_with_rows_that_do_not_count() -> None:
    for i, (case, call) in enumerate(
        calls(SPECS["gemma2"], torch.float64, ALL, seed=6)
    ):
        rng = torch.Generator().manual_seed(i)
        masked = with_query_mask(
            classed(call, i), torch.rand(call.query_shape, generator=rng) < 0.6
        )
        assert_same(logit_stats(masked).classes, recomputed(masked), case)


def test_cutting_the_rows_into_blocks_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "BLOCK", 60)
    monkeypatch.setattr(statistics, "ROWS", 2)
    for i, (case, call) in enumerate(
        calls(SPECS["qwen3"], torch.float64, SOME, seed=7)
    ):
        split = classed(call, i, alike=i % 2 == 0)
        assert_same(logit_stats(split).classes, recomputed(split), case)


@pytest.mark.parametrize("name", one_in(SOFT[::4], 4))
def test_hand_written_attention_gives_the_same(name: str) -> None:
    for i, (case, call) in enumerate(calls(SPECS[name], torch.float64, SOME, seed=8)):
        split = classed(call, i)
        written = dataclasses.replace(by_hand(call), classes=split.classes)
        found = logit_stats(split).classes
        assert found is not None
        assert_same(scores_stats(written).classes, taken_apart(found), case)
        unknown: ScoresCall = dataclasses.replace(written, q=None, k=None)
        alone = scores_stats(unknown).classes
        assert alone is not None
        assert not alone.n_normed.any()
        assert not alone.n_keys.any()
        torch.testing.assert_close(alone.mass, found.mass)


def test_weights_and_counts_add_up() -> None:
    for i, (case, call) in enumerate(
        calls(SPECS["qwen3"], torch.float64, SOME, seed=9)
    ):
        rng = torch.Generator().manual_seed(i)
        (b, t), s = call.query_shape, call.k.shape[2]
        query, key = (torch.randint(0, 3, (b, n), generator=rng) for n in (t, s))
        stats = logit_stats(
            dataclasses.replace(
                call, classes=TokenClasses(names=NAMES, query=query, key=key)
            )
        )
        split = stats.classes
        assert split is not None
        assert torch.equal(split.n_queries.sum(-1), stats.n_queries), case
        assert torch.equal(split.n_pairs.sum((-1, -2)), stats.n_pairs), case
        assert torch.equal(split.n_keys.sum(-1), stats.n_keys), case
        assert torch.equal(split.max_logit.amax((-1, -2)), stats.max_logit), case
        ones = (split.n_queries > 0).double()
        torch.testing.assert_close(split.mass.sum(-1), ones, msg=case)
        torch.testing.assert_close(split.uniform_mass.sum(-1), ones, msg=case)


def test_without_logits_that_differ_the_mass_is_the_uniform_one() -> None:
    for i, (case, call) in enumerate(
        calls(SPECS["baseline"], torch.float64, SOME[:6], seed=10)
    ):
        flat = classed(dataclasses.replace(call, q=torch.zeros_like(call.q)), i)
        if flat.mask is None or flat.mask.dtype == torch.bool:
            split = logit_stats(flat).classes
            assert split is not None
            torch.testing.assert_close(split.mass, split.uniform_mass, msg=case)


def test_merging_parts_gives_the_statistics_of_the_whole_and_none_is_neutral() -> None:
    _, call = next(iter(calls(SPECS["qwen3"], torch.float64, SOME, seed=11)))
    whole = classed(call, 0)
    assert whole.classes is not None
    parts = []
    for row in range(call.q.shape[0]):
        own = {x: getattr(whole, x)[row : row + 1] for x in ("q", "k", "v")}
        key = whole.classes.key[row : row + 1]
        classes = dataclasses.replace(
            whole.classes, query=whole.classes.query[row : row + 1], key=key
        )
        parts.append(
            logit_stats(dataclasses.replace(whole, **own, classes=classes)).classes
        )
    expected = logit_stats(whole).classes
    assert expected is not None
    assert_same(merge_classes(*parts), taken_apart(expected), "merged", 1e-12)
    assert merge_classes(None, expected) is expected
    assert merge_classes(expected, None) is expected
    assert merge_classes(None, None) is None


def test_a_pair_is_read_by_name_and_competition_is_the_ratio_of_mean_norms() -> None:
    _, call = next(iter(calls(SPECS["baseline"], torch.float64, SOME, seed=13)))
    b, _, t, _ = call.q.shape
    key = torch.zeros(1, call.k.shape[2], dtype=torch.long)
    query = (torch.arange(t)[None] % 2).expand(b, t)
    longer = dataclasses.replace(
        call,
        q=torch.ones_like(call.q) * torch.where(query == 0, 1.0, 3.0)[:, None, :, None],
        causal=False,
        mask=None,
        classes=TokenClasses(names=("short", "long", "never"), query=query, key=key),
    )
    split = logit_stats(longer).classes
    assert split is not None
    torch.testing.assert_close(
        split.query_competition,
        torch.full((call.q.shape[1],), 3.0, dtype=torch.float64),
    )
    assert split.key_competition.isnan().all()
    assert torch.equal(split.pair("mass", "long", "short"), split.mass[:, 1, 0])
    assert split.pair("mass", "long", "short").tolist() == pytest.approx(
        [1.0] * call.q.shape[1]
    )
    assert (split.pair("max_logit", "never", "long") == -torch.inf).all()
    with pytest.raises(
        ValueError, match="expected one of the classes short, long, never, got 'image'"
    ):
        split.pair("mass", "image", "short")
