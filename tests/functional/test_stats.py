"""LogitStats is a commutative monoid, and merging statistics of parts gives those of the whole."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkeel
from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.functional import class_statistics, statistics
from qkeel.functional.class_statistics import ClassStats, Merge
from qkeel.functional.statistics import TENSORS, LogitStats, merge

from .properties import few, randn, seeds

HEADS, GROUPS = 4, 2
counts = st.integers(0, 5)


def stats_of(logits: Tensor, entropy: Tensor, q: Tensor, k: Tensor) -> LogitStats:
    """Statistics from samples: logits [h pairs], entropy and query norms [h queries], key norms [g keys]."""
    empty = LogitStats.empty(HEADS, GROUPS, logits)
    found: dict[str, Tensor] = {}
    free = entropy.repeat(1, 2)
    for x, names in (
        (
            logits,
            {
                "max": "max_logit",
                "min": "min_logit",
                "mean": "mean_logit",
                "root": "qk_frobenius",
            },
        ),
        ((logits > 10).to(logits.dtype), {"mean": "share_above"}),
        (30 * torch.tanh(logits / 30), {"max": "capped_max_logit"}),
        (torch.tanh(logits / 30), {"max": "cos_max", "mean": "cos_mean"}),
        (entropy, {"mean": "entropy", "min": "entropy_min"}),
        (free, {"mean": "normalized_entropy"}),
        (free.square(), {"mean": "sink_share"}),
        (q, {"mean": "query_norm", "max": "query_norm_max"}),
        (k, {"mean": "key_norm", "max": "key_norm_max"}),
    ):
        if x.shape[1]:
            reduced = {
                "max": x.amax(1),
                "min": x.amin(1),
                "mean": x.mean(1),
                "root": x.norm(dim=1),
            }
            found.update({name: reduced[how] for how, name in names.items()})
    sizes = {
        "n_pairs": logits,
        "n_products": logits,
        "n_queries": entropy,
        "n_free": free,
        "n_keys": k,
    }
    found.update({name: torch.full((len(x),), x.shape[1]) for name, x in sizes.items()})
    return dataclasses.replace(empty, **found)


def samples(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        20 * randn(seed, HEADS, 3 * n),
        randn(seed + 1, HEADS, n).abs(),
        randn(seed + 2, HEADS, n).abs(),
        randn(seed + 3, GROUPS, n).abs(),
    )


def same(a: LogitStats, b: LogitStats, rtol: float = 0.0) -> None:
    for field in TENSORS:
        torch.testing.assert_close(
            getattr(a, field), getattr(b, field), rtol=rtol, atol=0, msg=field
        )


@few
@given(seed=seeds, a=counts, b=counts)
def test_merging_parts_gives_the_statistics_of_the_whole(
    seed: int, a: int, b: int
) -> None:
    x, y = samples(seed, a), samples(seed + 10, b)
    whole = stats_of(*(torch.cat(pair, dim=1) for pair in zip(x, y)))
    same(merge(stats_of(*x), stats_of(*y)), whole, rtol=1e-12)


@few
@given(seed=seeds, n=counts)
def test_the_empty_statistics_are_neutral_bit_for_bit(seed: int, n: int) -> None:
    x = stats_of(*samples(seed, n))
    empty = LogitStats.empty(HEADS, GROUPS, x.max_logit)
    same(merge(empty, x), x)
    same(merge(x, empty), x)
    same(merge(empty, empty), empty)


def test_empty_statistics_hold_no_nan_and_no_magnitude() -> None:
    empty = LogitStats.empty(HEADS, GROUPS, torch.zeros(1))
    for field in TENSORS:
        assert not getattr(empty, field).isnan().any(), field
    assert empty.max_logit.tolist() == [-torch.inf] * HEADS
    assert empty.max_abs_logit.tolist() == [0.0] * HEADS
    assert empty.key_norm.shape == (GROUPS,)


def test_max_logit_is_signed_and_max_abs_logit_is_not() -> None:
    x = stats_of(-1 - randn(0, HEADS, 5).abs(), *samples(1, 5)[1:])
    assert (x.max_logit < 0).all()
    assert torch.equal(x.max_abs_logit, -x.min_logit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_keeps_dtype_and_counts_stay_integers(dtype: torch.dtype) -> None:
    x = stats_of(*(part.to(dtype) for part in samples(0, 3)))
    merged = merge(x, x)
    for field in TENSORS:
        kind = getattr(merged, field).dtype
        assert kind == (torch.int64 if field.startswith("n_") else dtype), field


def test_one_sample_merged_with_none_is_that_sample_and_two_are_their_mean() -> None:
    x, y, nothing = (
        stats_of(*samples(seed, n)) for seed, n in ((0, 1), (10, 1), (20, 0))
    )
    for one in (x, y):
        same(merge(one, nothing), one)
        same(merge(nothing, one), one)
    both = merge(x, y)
    for name in (
        "mean_logit",
        "entropy",
        "query_norm",
        "key_norm",
        "sink_share",
        "cos_mean",
    ):
        mean = (getattr(x, name) + getattr(y, name)) / 2
        torch.testing.assert_close(
            getattr(both, name), mean, rtol=1e-12, atol=0, msg=name
        )


def test_statistics_of_different_sites_are_not_merged() -> None:
    a = LogitStats.empty(4, 2, torch.zeros(1))
    for other in (
        LogitStats.empty(8, 2, torch.zeros(1)),
        LogitStats.empty(4, 4, torch.zeros(1)),
    ):
        with pytest.raises(
            InvalidValueError, match="merge only statistics of the same site"
        ):
            merge(a, other)


@pytest.mark.parametrize(
    ("kind", "rules"),
    [(LogitStats, statistics.MERGES), (ClassStats, class_statistics.MERGES)],
)
def test_every_tensor_of_the_statistics_has_one_rule_by_which_it_merges(
    kind: Any, rules: dict[str, Merge]
) -> None:
    fields = [field.name for field in dataclasses.fields(kind)]
    assert [name for name in fields if name not in ("classes", "names")] == list(rules)
    for rule in rules.values():
        assert (rule.how == "mean") == bool(rule.count)
        assert not rule.count or rules[rule.count].how == "sum"


def test_a_statistic_is_read_by_its_recorded_name() -> None:
    stats = stats_of(*samples(0, 3))
    for name in (*TENSORS, "max_abs_logit", "non_finite"):
        found = stats.value(name)
        assert found is not None
        assert torch.equal(found, getattr(stats, name)), name
    assert stats.value("merge") is None
    assert stats.value("classes") is None


def test_a_head_is_not_finite_where_a_logit_or_the_entropy_is_not_and_what_was_not_measured_does_not_count() -> (
    None
):
    nan, inf = math.nan, math.inf
    # Maximum, minimum, entropy, pairs, not finite.
    rows = [
        (3.0, -1.0, 0.5, 4, 0.0),
        # A kernel's: minima were not measured.
        (3.0, inf, 0.5, 0, 0.0),
        (3.0, -inf, 0.5, 4, 1.0),
        (inf, -1.0, 0.5, 4, 1.0),
        (nan, nan, nan, 4, 1.0),
        (3.0, -1.0, nan, 4, 1.0),
        (3.0, nan, 0.5, 1, 1.0),
    ]
    top, low, entropy, pairs, expected = (torch.tensor(x) for x in zip(*rows))
    stats = dataclasses.replace(
        LogitStats.empty(len(rows), 1, top),
        max_logit=top,
        min_logit=low,
        entropy=entropy,
        n_pairs=pairs,
    )
    assert stats.non_finite.tolist() == expected.tolist()


def classes_of(
    heads: int, groups: int, names: tuple[str, ...] = ("text", "image")
) -> ClassStats:
    """Statistics by class of so many heads, all of them 1."""
    c = len(names)
    shapes = {
        name: (groups if "key" in name else heads, c)
        for name in class_statistics.TENSORS
    }
    shapes |= dict.fromkeys(
        ("max_logit", "mass", "uniform_mass", "n_pairs"), (heads, c, c)
    )
    return ClassStats(
        names=names,
        **{
            n: torch.ones(shape, dtype=torch.int64 if n.startswith("n_") else None)
            for n, shape in shapes.items()
        },  # type: ignore[arg-type]
    )


def test_statistics_by_class_are_merged_and_joined_where_classes_and_heads_are_the_same() -> (
    None
):
    one = classes_of(4, 2)
    for other in (
        classes_of(4, 2, ("text", "sound")),
        classes_of(2, 2),
        classes_of(4, 4),
    ):
        with pytest.raises(
            InvalidValueError,
            match="merge only statistics of the same site and classes",
        ):
            class_statistics.merge_classes(one, other)
    assert class_statistics.joined_classes([one, None]) is None
    joined = class_statistics.joined_classes([one, classes_of(3, 1)])
    assert joined is not None
    assert (joined.names, joined.mass.shape, joined.key_norm.shape) == (
        ("text", "image"),
        (7, 2, 2),
        (3, 2),
    )


def test_classes_of_tokens_are_whole_numbers_from_minus_1_to_the_last() -> None:
    for right in (
        torch.tensor([[-1, 0, 2]]),
        torch.tensor([[2]], dtype=torch.int8),
        torch.empty(2, 0, dtype=torch.long),
    ):
        class_statistics.check_classes(right, 3)
    for wrong, says in (
        (
            torch.tensor([[0, 3]]),
            "from 0 to 2, or -1 for a token without a class, got 0 to 3",
        ),
        (
            torch.tensor([[-2, 1]]),
            "from 0 to 2, or -1 for a token without a class, got -2 to 1",
        ),
    ):
        with pytest.raises(InvalidValueError, match=says):
            class_statistics.check_classes(wrong, 3)
    for kind in (torch.float32, torch.complex64):
        with pytest.raises(InvalidTypeError, match=f"as whole numbers, got {kind}"):
            class_statistics.check_classes(torch.zeros(1, 2, dtype=kind), 3)


def test_many_statistics_merge_as_two_by_two() -> None:
    def part(seed: int) -> LogitStats:
        torch.manual_seed(seed)
        q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
        return qkeel.attention(q, k, k, spec=qkeel.AttentionSpec(), stats=True)[1]

    parts = [LogitStats.empty(2, 2, torch.zeros(())), *map(part, range(5))]
    pairs = functools.reduce(merge, parts)
    for name, x in merge(*parts).tensors().items():
        torch.testing.assert_close(x, pairs.tensors()[name], rtol=1e-5, atol=1e-6)
    same = merge(parts[1], parts[1], parts[1])
    for name in ("mean_logit", "entropy", "query_norm", "sink_share"):
        # The mean of equal values is that value.
        assert torch.equal(same.tensors()[name], parts[1].tensors()[name])
