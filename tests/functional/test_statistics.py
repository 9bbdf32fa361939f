"""LogitStats is a commutative monoid: parts merge to the whole; of rows, of keys, by class of token."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.functional import class_statistics, statistics
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import (
    TENSORS,
    KernelRows,
    LogitStats,
    merge,
    of_key_heads,
    reduce_kernel_rows,
)
from qkeel.kernels.statistics import logit_stats
from qkeel.spec import AttentionSpec, Fixed, Sink
from qkeel.spec.call import make_call

from .properties import few, randn, seeds

HEADS, GROUPS = 4, 2
counts = st.integers(0, 5)
# What is reduced in each way, of each kind of samples; every field once.
FIELDS = {
    "n_pairs": "max_logit capped_max_logit min_logit mean_logit share_above",
    "n_products": "cos_max cos_mean qk_frobenius",
    "n_queries": "entropy entropy_min query_norm query_norm_max logit_spread",
    "n_free": "normalized_entropy softmax_gradient sink_share logit_gap",
    "n_keys": "key_norm key_norm_max",
}
REDUCTIONS = {
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "mean": lambda x: x.mean(1),
    "root": lambda x: x.norm(dim=1),
}


def samples(seed, n, dtype=torch.float64):
    """Samples [heads n] of every field; key heads have their own."""
    return {
        name: randn(seed + i, GROUPS if of_key_heads(name) else HEADS, n).to(dtype)
        for i, name in enumerate(TENSORS)
    }


def stats_of(x):
    """Statistics from samples, by the rule of each field."""
    empty = LogitStats.empty(HEADS, GROUPS, x["max_logit"])
    fields = {}
    for count, names in FIELDS.items():
        fields[count] = torch.full_like(getattr(empty, count), x[count].shape[1])
        for name in names.split():
            # Largest norms are never below 0.
            values = x[name].abs() if name.endswith("norm_max") else x[name]
            if values.shape[1]:
                fields[name] = REDUCTIONS[statistics.MERGES[name].how](values)
    return dataclasses.replace(empty, **fields)


def same(a, b, rtol=0.0):
    for field in TENSORS:
        values = getattr(a, field), getattr(b, field)
        assert_close(*values, rtol=rtol, atol=rtol, msg=field)


@few
@given(seed=seeds, a=counts, b=counts)
def test_merging_parts_gives_the_statistics_of_the_whole(seed, a, b):
    x, y = samples(seed, a), samples(seed + 100, b)
    whole = stats_of({name: torch.cat([x[name], y[name]], 1) for name in x})
    same(merge(stats_of(x), stats_of(y)), whole, rtol=1e-12)


@few
@given(seed=seeds, n=counts)
def test_the_empty_statistics_are_neutral_bit_for_bit(seed, n):
    x = stats_of(samples(seed, n))
    empty = LogitStats.empty(HEADS, GROUPS, x.max_logit)
    same(merge(empty, x), x)
    same(merge(x, empty), x)
    same(merge(empty, empty), empty)
    assert not any(value.isnan().any() for value in empty.tensors().values())
    assert empty.max_abs_logit.tolist() == [0.0] * HEADS


def test_many_statistics_merge_as_two_by_two():
    # The second has no samples.
    stats = [stats_of(samples(seed, n)) for seed, n in enumerate((3, 0, 1, 4))]
    same(merge(*stats), functools.reduce(merge, stats), rtol=1e-12)
    again = merge(stats[0], stats[0], stats[0])
    for name in ("mean_logit", "entropy", "query_norm", "sink_share"):
        # The mean of equal values is that value.
        assert torch.equal(getattr(again, name), getattr(stats[0], name))


def test_a_statistic_is_read_by_its_recorded_name():
    stats = stats_of(samples(0, 3))
    for name in (*TENSORS, "max_abs_logit", "non_finite"):
        value = stats.value(name)
        assert value is not None
        assert torch.equal(value, getattr(stats, name)), name
    assert stats.value("merge") is stats.value("classes") is None


def test_a_head_is_not_finite_where_a_logit_or_the_entropy_is_not():
    nan, inf = math.nan, math.inf
    rows = [  # maximum, minimum, entropy, pairs, largest magnitude, not finite
        (3.0, -4.0, 0.5, 4, 4.0, 0.0),
        (-3.0, -4.0, 0.5, 4, 4.0, 0.0),
        # A kernel's: minima were not measured.
        (3.0, inf, 0.5, 0, 3.0, 0.0),
        (3.0, -inf, 0.5, 4, inf, 1.0),
        (inf, -1.0, 0.5, 4, inf, 1.0),
        (nan, nan, nan, 4, nan, 1.0),
        (3.0, -1.0, nan, 4, 3.0, 1.0),
        (3.0, nan, 0.5, 1, nan, 1.0),
    ]
    top, low, entropy, pairs, magnitude, broken = (torch.tensor(x) for x in zip(*rows))
    fields = {"max_logit": top, "min_logit": low, "entropy": entropy, "n_pairs": pairs}
    stats = dataclasses.replace(LogitStats.empty(len(rows), 1, top), **fields)
    assert stats.non_finite.tolist() == broken.tolist()
    assert_close(stats.max_abs_logit, magnitude, equal_nan=True)


# Of rows and keys.


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_row_of_one_key_has_no_entropy_and_a_cosine_of_at_most_one(sign):
    q, alone = torch.randn(1, 1, 400, 3), torch.eye(400, dtype=torch.bool)
    call = make_call(AttentionSpec(), q, 3 * sign * q, q, causal=False, mask=alone)
    stats = logit_stats(call)
    for entropy in (stats.entropy, stats.n_free, stats.normalized_entropy):
        assert entropy.item() == 0
    for cosine in (stats.cos_max, stats.cos_mean):
        assert 0.999 <= sign * cosine.item() <= 1


def rows_of_weights(z, *, sink=None, shift=0.0, mask=None, native="0"):
    """Statistics of one head whose row i has the logits z[i], of keys that are unit vectors."""
    t, s = z.shape
    q, k = (
        torch.zeros(1, 1, t, 8 * (-(-s // 8))),
        torch.zeros(1, 1, s, 8 * (-(-s // 8))),
    )
    q[..., :s], k[..., :s] = z + shift, torch.eye(s)
    spec = AttentionSpec(scale=Fixed(1.0))
    if sink is not None:
        spec = dataclasses.replace(spec, normalizer=Sink(init=sink, learned=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", native)
        return logit_stats(make_call(spec, q, k, k, causal=False, mask=mask))


BY_HAND = torch.tensor([[1.0, 2.0, 1.0], [1.0, 3.0, 9.0], [5.0, 9.0, 9.0]]).log()
SEEN = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])


@pytest.mark.parametrize("native", ["0", "1"])
def test_what_a_softmax_passes_back_by_hand(native):
    # Weights (1/4, 1/2, 1/4) and (1/4, 3/4); the last row has one key and does not count.
    expected = (15 / 16 + 3 / 4) / 2
    for sink in (None, -1.0, 30.0):
        for shift in (0.0, 100.0):
            stats = rows_of_weights(
                BY_HAND, sink=sink, shift=shift, mask=SEEN, native=native
            )
            assert stats.softmax_gradient.item() == pytest.approx(expected, rel=1e-5)
            assert stats.n_free.item() == 2
    alone = rows_of_weights(BY_HAND, mask=SEEN[2:], native=native)
    assert (alone.softmax_gradient.item(), alone.n_free.item()) == (0.0, 0)


@few
@given(seed=seeds, s=st.integers(2, 200), size=st.sampled_from([0.1, 3.0, 40.0, 3e3]))
def test_what_a_softmax_passes_back_lies_between_one_key_and_uniform_attention(
    seed, s, size
):
    z = size * randn(seed, 5, s).float()
    p = z.double().softmax(-1)
    exact = ((p * (1 - p)).sum(-1) / (1 - 1 / s)).mean().item()
    order = torch.randperm(s, generator=torch.Generator().manual_seed(seed))
    for native in ("0", "1"):
        for logits in (z, z[:, order], z[:, z[0].argsort()]):
            stats = rows_of_weights(logits, native=native)
            # Rounding a logit by a share of 6e-8 changes its weight by so many nats.
            near = pytest.approx(exact, abs=2e-6 + 1e-6 * size)
            assert stats.softmax_gradient.item() == near
        uniform = rows_of_weights(torch.full((5, s), size), native=native)
        assert uniform.softmax_gradient.item() == pytest.approx(1, abs=1e-5)
        one_hot = rows_of_weights(200 * torch.eye(s), native=native)
        assert one_hot.softmax_gradient.item() == 0


def test_rows_of_a_kernel_by_hand_some_see_no_key_and_some_do_not_count():
    # [b h t] = [2 1 3]: the last row of the first sequence sees no key, the first row of the second does not count.
    rows = KernelRows(
        largest=torch.tensor([[[1.0, 5.0, -torch.inf]], [[9.0, 2.0, 3.0]]]),
        lse=torch.tensor([[[1.0, 6.0, -torch.inf]], [[9.5, 2.5, 3.5]]]),
        entropy=torch.tensor([[[0.5, 1.5, 0.0]], [[7.0, 0.25, 0.75]]]),
    )
    for counted, numbers in (
        ([[True, True, True], [False, True, True]], (4, 5.0, 0.75, 0.25)),
        ([[True, False, False], [False] * 3], (1, 1.0, 0.5, 0.5)),
        ([[False] * 3] * 2, (0, -torch.inf, 0.0, torch.inf)),
    ):
        stats = reduce_kernel_rows(rows, torch.tensor(counted), 1)
        values = stats.n_queries, stats.max_logit, stats.entropy, stats.entropy_min
        assert tuple(x.item() for x in values) == numbers
    lost = torch.tensor([[[torch.nan, 1.0]]])
    stats = reduce_kernel_rows(KernelRows(lost, lost, lost), None, 1)
    assert stats.max_logit.isnan().all()


def test_what_a_key_holds_that_no_row_sees_is_in_no_number():
    q, k = randn(0, 2, 2, 3, 8), randn(1, 2, 1, 4, 8)
    shown = torch.tensor([True, False, True, True])
    spoilt = k.masked_fill(~shown[:, None], torch.nan)
    stats, again = (
        logit_stats(make_call(AttentionSpec(), q, x, x, causal=False, mask=shown))
        for x in (k, spoilt)
    )
    same(again, stats)
    norms = k[:, 0, shown].norm(dim=-1)
    assert stats.n_keys.item() == norms.numel()
    assert stats.key_norm.item() == pytest.approx(norms.mean().item())
    assert stats.key_norm_max.item() == pytest.approx(norms.max().item())


# Statistics by class.


def test_the_competition_index_takes_classes_last_whatever_comes_before():
    norms = torch.tensor([[[2.0, 6.0], [1.0, 5.0], [4.0, 4.0]]])
    counts = torch.tensor([[[1, 1], [1, 0], [2, 3]]])
    ratio = class_statistics.norm_ratio(norms, counts)
    assert_close(ratio, torch.tensor([[3.0, math.nan, 1.0]]), equal_nan=True)


def classes_of(heads, groups, names="text image"):
    """Statistics by class of so many heads, all of them 1."""
    c, pairs = len(names.split()), ("max_logit", "mass", "uniform_mass", "n_pairs")
    fields = {}
    for name in class_statistics.TENSORS:
        shape = (
            (heads, c, c) if name in pairs else (groups if "key" in name else heads, c)
        )
        dtype = torch.int64 if name.startswith("n_") else None
        fields[name] = torch.ones(shape, dtype=dtype)
    return ClassStats(names=tuple(names.split()), **fields)


def test_statistics_are_merged_and_joined_where_sites_and_classes_are_the_same():
    stats = LogitStats.empty(4, 2, torch.zeros(1))
    for heads, groups in ((8, 2), (4, 4)):
        with pytest.raises(InvalidValueError, match="statistics of the same site"):
            merge(stats, LogitStats.empty(heads, groups, torch.zeros(1)))
    split = classes_of(4, 2)
    for other in (classes_of(4, 2, "text sound"), classes_of(2, 2), classes_of(4, 4)):
        with pytest.raises(InvalidValueError, match="the same site and classes"):
            class_statistics.merge_classes(split, other)
    assert class_statistics.joined_classes([split, None]) is None
    joined = class_statistics.joined_classes([split, classes_of(3, 1)])
    assert (joined.names, joined.mass.shape) == (("text", "image"), (7, 2, 2))
    assert joined.key_norm.shape == (3, 2)


def test_classes_of_tokens_are_whole_numbers_from_minus_1_to_the_last():
    for right in ([[-1, 0, 2]], [[2]], [[]]):
        class_statistics.check_classes(torch.tensor(right, dtype=torch.int8), 3)
    for wrong in ([[0, 3]], [[-2, 1]]):
        with pytest.raises(InvalidValueError, match="from 0 to 2, or -1"):
            class_statistics.check_classes(torch.tensor(wrong), 3)
    for kind in (torch.float32, torch.complex64):
        with pytest.raises(InvalidTypeError):
            class_statistics.check_classes(torch.zeros(1, 2, dtype=kind), 3)
