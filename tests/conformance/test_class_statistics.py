"""Statistics split by token classes are those of a straightforward T×T recomputation, for every spec and mask."""

import dataclasses

import pytest
import torch
from tests.quick import one_in
from torch.testing import assert_close

from qkeel.functional.class_statistics import TokenClasses, merge_classes, norm_ratio
from qkeel.kernels import statistics
from qkeel.kernels.statistics import logit_stats
from qkeel.reference import attend_call
from qkeel.spec.call import with_query_mask

from .cases import SOME, SPECS, calls, share
from .test_scores_statistics import SOFT, by_hand

NAMES = ("text", "image", "sound")


def classed(call, seed, *, alike=False):
    """Random classes; some tokens are of none."""
    rng = torch.Generator().manual_seed(seed)
    (b, t), s = call.query_shape, call.k.shape[2]
    rows = 1 if alike else b
    query, key = (torch.randint(-1, 3, (rows, n), generator=rng) for n in (t, s))
    classes = TokenClasses(names=NAMES, query=query, key=key)
    return dataclasses.replace(call, classes=classes)


def recomputed(call):
    """Every field from the oracle's T×T matrices, for all pairs of classes at once."""
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


def same(ours, theirs, case, tolerance=1e-11):
    near = {"rtol": tolerance, "atol": tolerance}
    message = lambda text: f"{case}: {text}"  # noqa: E731
    assert_close(ours.tensors(), theirs, **near, msg=message)


@pytest.mark.parametrize("name", one_in(SPECS, 4))
def test_they_are_those_of_the_whole_matrix_in_float64(name, monkeypatch):
    """Every second call in blocks of a few rows, some of which do not count."""
    for i, (case, call) in enumerate(
        calls(SPECS[name], torch.float64, share(name, 2), seed=5)
    ):
        split = classed(call, i, alike=i % 2 == 0)
        if i % 2:
            monkeypatch.setattr(statistics, "BLOCK", 60)
            monkeypatch.setattr(statistics, "ROWS", 2)
            split = with_query_mask(split, torch.rand(call.query_shape) < 0.6)
        same(logit_stats(split).classes, recomputed(split), case)
        monkeypatch.undo()


@pytest.mark.parametrize("name", one_in(SOFT[::4], 8))
def test_hand_written_attention_gives_the_same(name):
    for i, (case, call) in enumerate(calls(SPECS[name], torch.float64, SOME, seed=8)):
        split = classed(call, i)
        written = dataclasses.replace(by_hand(call), classes=split.classes)
        classes = logit_stats(split).classes
        same(logit_stats(written).classes, classes.tensors(), case)
        unknown = dataclasses.replace(written, q=None, k=None)
        alone = logit_stats(unknown).classes
        assert not alone.n_normed.any()
        assert not alone.n_keys.any()
        assert_close(alone.mass, classes.mass)


def test_merging_parts_gives_the_statistics_of_the_whole_and_none_is_neutral():
    _, call = next(iter(calls(SPECS["qwen3"], torch.float64, SOME, seed=11)))
    split, parts = classed(call, 0), []
    for row in range(call.q.shape[0]):
        rows = slice(row, row + 1)
        sides = {x: getattr(split.classes, x)[rows] for x in ("query", "key")}
        tensors = {x: getattr(split, x)[rows] for x in ("q", "k", "v")}
        classes = dataclasses.replace(split.classes, **sides)
        part = dataclasses.replace(split, **tensors, classes=classes)
        parts.append(logit_stats(part).classes)
    expected = logit_stats(split).classes
    same(merge_classes(*parts), expected.tensors(), "merged", 1e-12)
    assert merge_classes(None, expected) is expected
    assert merge_classes(expected, None) is expected
    assert merge_classes(None, None) is None


def test_a_pair_is_read_by_name():
    _, call = next(iter(calls(SPECS["baseline"], torch.float64, SOME, seed=13)))
    split = logit_stats(classed(call, 0)).classes
    assert torch.equal(split.pair("mass", "image", "text"), split.mass[:, 1, 0])
    queries = norm_ratio(split.query_norm, split.n_normed)
    assert torch.equal(split.query_competition, queries)
    assert torch.equal(split.key_competition, norm_ratio(split.key_norm, split.n_keys))
    with pytest.raises(ValueError, match="got 'video'"):
        split.pair("mass", "video", "text")
