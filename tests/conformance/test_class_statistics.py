"""Statistics split by token classes are those of a straightforward T×T recomputation, for every spec and mask."""

import dataclasses

import pytest
import torch
from tests.quick import one_in

from qkeel.capture.calls import scores_stats
from qkeel.functional.class_statistics import (
    TokenClasses,
    merge_classes,
    norm_ratio,
)
from qkeel.kernels import statistics
from qkeel.kernels.statistics import logit_stats
from qkeel.reference import attend_call
from qkeel.spec.call import with_query_mask

from .cases import GEOMETRIES, MASKS, SOME, SPECS, calls, pairs, share
from .test_scores_statistics import SOFT, by_hand

ALL = pairs(GEOMETRIES, MASKS)
NAMES = ("text", "image", "sound")


def classed(call, seed, *, alike=False):
    """Random classes; some tokens are of none."""
    rng = torch.Generator().manual_seed(seed)
    (b, t), s = call.query_shape, call.k.shape[2]
    rows = 1 if alike else b
    query, key = (torch.randint(-1, 3, (rows, n), generator=rng) for n in (t, s))
    return dataclasses.replace(
        call, classes=TokenClasses(names=NAMES, query=query, key=key)
    )


def recomputed(call):
    """Every field from the oracle's T×T matrices, for all pairs of classes at once."""
    assert call.classes is not None
    truth, (q, k) = attend_call(call), call.encoded()
    b, g = k.shape[:2]
    visible = truth.logits > -torch.inf
    if call.query_mask is not None:
        visible = visible & call.query_mask[:, None, :, None]
    a, c = (
        (of.expand(b, -1)[..., None] == torch.arange(3))[:, None]
        for of in (call.classes.query, call.classes.key)
    )
    rows = visible.any(-1, keepdim=True) & a  # [b h t a]
    keys = visible.unflatten(1, (g, -1)).any(2).any(2)[..., None] & c  # [b g s c]
    pairs = (
        visible[..., None, None] & a[:, :, :, None, :, None] & c[:, :, None, :, None]
    )
    p = truth.weights / truth.weights.sum(-1, keepdim=True).clamp_min(1e-300)
    seen = visible.double()
    even = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    z = truth.logits[..., None, None].masked_fill(~pairs, -torch.inf)
    n_queries = rows.sum((0, 2))
    mass, uniform_mass = (
        torch.einsum("bhta,bhtc->hac", rows.double(), x @ c.double())
        / n_queries.clamp_min(1)[..., None]
        for x in (p, even)
    )
    found = {
        "max_logit": z.amax((0, 2, 3)),
        "mass": mass,
        "uniform_mass": uniform_mass,
        "n_queries": n_queries,
        "n_normed": n_queries,
        "n_pairs": pairs.sum((0, 2, 3)),
        "n_keys": keys.sum((0, 2)),
    }
    for name, x, of in (("query", q, rows), ("key", k, keys)):
        norms = x.norm(dim=-1)[..., None] * of
        found[f"{name}_norm"] = norms.sum((0, 2)) / of.sum((0, 2)).clamp_min(1)
        found[f"{name}_norm_max"] = norms.amax((0, 2))
    return found


def assert_same(
    ours,
    theirs,
    case,
    tolerance=1e-11,
):
    assert ours is not None
    torch.testing.assert_close(
        ours.tensors(), theirs, rtol=tolerance, atol=tolerance, msg=lambda m: case + m
    )


@pytest.mark.parametrize("name", one_in(SPECS, 4))
def test_they_are_those_of_the_whole_matrix_in_float64(name):
    for i, (case, call) in enumerate(
        calls(SPECS[name], torch.float64, share(name, 2), seed=5)
    ):
        split = classed(call, i, alike=i % 2 == 0)
        assert_same(logit_stats(split).classes, recomputed(split), case)


def test_so_they_are_for_every_geometry_in_blocks_and_with_rows_that_do_not_count(
    monkeypatch,
):
    monkeypatch.setattr(statistics, "BLOCK", 60)
    monkeypatch.setattr(statistics, "ROWS", 2)
    for i, (case, call) in enumerate(
        calls(SPECS["gemma2"], torch.float64, ALL, seed=6)
    ):
        rng = torch.Generator().manual_seed(i)
        masked = with_query_mask(
            classed(call, i), torch.rand(call.query_shape, generator=rng) < 0.6
        )
        assert_same(logit_stats(masked).classes, recomputed(masked), case)


@pytest.mark.parametrize("name", one_in(SOFT[::4], 8))
def test_hand_written_attention_gives_the_same(name):
    for i, (case, call) in enumerate(calls(SPECS[name], torch.float64, SOME, seed=8)):
        split = classed(call, i)
        written = dataclasses.replace(by_hand(call), classes=split.classes)
        found = logit_stats(split).classes
        assert found is not None
        assert_same(scores_stats(written).classes, found.tensors(), case)
        unknown = dataclasses.replace(written, q=None, k=None)
        alone = scores_stats(unknown).classes
        assert alone is not None
        assert not alone.n_normed.any()
        assert not alone.n_keys.any()
        torch.testing.assert_close(alone.mass, found.mass)


def test_merging_parts_gives_the_statistics_of_the_whole_and_none_is_neutral():
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
    assert_same(merge_classes(*parts), expected.tensors(), "merged", 1e-12)
    assert merge_classes(None, expected) is expected
    assert merge_classes(expected, None) is expected
    assert merge_classes(None, None) is None


def test_a_pair_is_read_by_name():
    _, call = next(iter(calls(SPECS["baseline"], torch.float64, SOME, seed=13)))
    split = logit_stats(classed(call, 0)).classes
    assert split is not None
    assert torch.equal(split.pair("mass", "image", "text"), split.mass[:, 1, 0])
    counts = split.query_norm, split.n_normed
    assert torch.equal(split.query_competition, norm_ratio(*counts))
    assert torch.equal(split.key_competition, norm_ratio(split.key_norm, split.n_keys))
    with pytest.raises(
        ValueError, match="expected one of the classes text, image, sound, got 'video'"
    ):
        split.pair("mass", "video", "text")
