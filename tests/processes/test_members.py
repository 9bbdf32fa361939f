"""What the vectors of many processes reduce to is what merging their statistics one by one gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkeel.distributed.reduce import Member, SharedTable
from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import MERGES as CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import MERGES, LogitStats, merge
from qkeel.monitor import Layout
from qkeel.monitor.gather import (
    Measurement,
    PartialValue,
    StepRecord,
    flatten,
    merged_records,
    vector_of,
)

HEADS, KEYS = 3, 2


def of_process(seed, n=HEADS):
    """Random statistics."""
    g = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, rule in MERGES.items():
        shape = [KEYS if name.startswith(("key_", "n_keys")) else n]
        if rule.how == "sum":
            values[name] = torch.randint(1, 10**12, shape, generator=g)
        else:
            values[name] = torch.rand(shape, dtype=torch.float64, generator=g)
    return LogitStats(**values)  # type: ignore[arg-type]


def member(measured, **fields):
    """A process, as it describes itself."""
    form = () if measured is None else flatten(measured)[0].form
    return Member(form=form, parameters={"": 1}, **fields)  # type: ignore[arg-type]


def reduced(members, measured):
    """What every process reads of the vectors that all of them send."""
    tables = [SharedTable(members, rank) for rank in range(len(members))]
    sent = []
    for table, of_rank in zip(tables, measured, strict=True):
        vector = None if of_rank is None else vector_of(flatten(of_rank)[1])
        sent.append(table.split(vector, [-1.0, 1.0]))
    largest, sums = (torch.stack(vectors) for vectors in zip(*sent))
    everywhere = [
        table.join(largest.amax(0).numpy(), sums.sum(0).numpy(), 2) for table in tables
    ]
    for vector in everywhere:
        np.testing.assert_array_equal(vector, everywhere[0])
    return None if everywhere[0] is None else StepRecord(tables[0].table, everywhere[0])


def replicas(measured, others=0):
    """Data-parallel processes, of which the last had no numbers when all met."""
    members = [
        member(of_rank, layout=Layout(data=rank))
        for rank, of_rank in enumerate(measured)
    ]
    return members + [
        member(None, layout=Layout(data=len(measured) + i)) for i in range(others)
    ]


def number(record, site, name):
    assert record is not None
    return record.table.read(record.vector, record.table.entries[site, name]).tolist()


def close(merged, expected):
    for name, values in merged.tensors().items():
        theirs = expected.tensors()[name].to(values.dtype)
        torch.testing.assert_close(
            values, theirs, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name
        )


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 5),
    st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1e300]), max_size=3),
)
def test_the_reduction_is_the_merge(world: int, odd: list[float]) -> None:
    measured = [
        Measurement(stats={"a": of_process(i)}, numbers={}) for i in range(world)
    ]
    for i, value in enumerate(odd):
        for name in ("max_logit", "min_logit", "entropy_min"):
            measured[i % world].stats["a"].tensors()[name][0] = value
    expected = merge(*(of_rank.stats["a"] for of_rank in measured))
    record = reduced(replicas(measured), measured)
    assert record is not None
    close(record.stats["a"], expected)
    steps = []
    for of_rank in measured:
        table, tensors = flatten(of_rank)
        steps.append(StepRecord(table, vector_of(tensors).numpy()))
    close(merged_records(steps)["a"], expected)  # steps are merged as processes are


def test_a_process_without_numbers_changes_nothing():
    measured = [Measurement(stats={"a": of_process(i)}, numbers={}) for i in range(2)]
    record = reduced(replicas(measured, others=2), [*measured, None, None])
    assert record is not None
    close(record.stats["a"], merge(measured[0].stats["a"], measured[1].stats["a"]))
    assert reduced(replicas(measured), [None, None]) is None


def test_heads_that_are_split_stand_next_to_each_other_and_copies_count_once():
    measured = [
        Measurement(stats={"a": of_process(seed)}, numbers={}) for seed in (0, 1, 0, 1)
    ]
    layouts = [Layout(data=0, head_part=part, head_parts=2) for part in (0, 1, 0, 1)]
    members = [
        member(of_rank, layout=layout, splits={"a": (True, False)})
        for of_rank, layout in zip(measured, layouts)
    ]
    record = reduced(members, measured)
    assert record is not None
    stats = record.stats["a"]
    parts = [of_rank.stats["a"] for of_rank in measured[:2]]
    assert torch.equal(stats.n_pairs, torch.cat([part.n_pairs for part in parts]))
    assert torch.equal(stats.max_logit, torch.cat([part.max_logit for part in parts]))
    assert torch.equal(
        stats.n_keys, parts[0].n_keys
    )  # all have the same keys, which are counted once
    about = SharedTable(members, 0).about()
    assert about == {
        "sites": [
            {
                "head_dim": 0,
                "weights": "unknown",
                "name": "a",
                "n_heads": 2 * HEADS,
                "n_kv_heads": KEYS,
            }
        ],
        "parameters": 1,
    }


def test_the_queries_of_a_context_add_up_and_the_keys_of_whoever_saw_most_count():
    measured = [
        Measurement(stats={"a": of_process(seed)}, numbers={}) for seed in (0, 1)
    ]
    members = [
        member(of_rank, layout=Layout(context=rank), keys_seen=rank)
        for rank, of_rank in enumerate(measured)
    ]
    record = reduced(members, measured)
    assert record is not None
    stats, (first, second) = (
        record.stats["a"],
        [of_rank.stats["a"] for of_rank in measured],
    )
    assert torch.equal(stats.n_queries, first.n_queries + second.n_queries)
    assert torch.equal(stats.key_norm, second.key_norm)


def test_stages_of_equal_names_are_told_apart_by_their_number():
    measured = [
        Measurement(
            stats={"attn": of_process(stage)},
            numbers={
                ("", "train_loss"): torch.tensor(stage),
                ("attn", "query_weight_norm"): torch.ones(3) * stage,
            },
        )
        for stage in (0, 1)
    ]
    members = [
        member(of_rank, layout=Layout(stage=stage))
        for stage, of_rank in enumerate(measured)
    ]
    record = reduced(members, measured)
    assert record is not None
    assert record.sites == ["stages.0.attn", "stages.1.attn"]
    assert number(record, "stages.1.attn", "query_weight_norm") == [1.0] * 3
    assert number(record, "", "train_loss") == 1.0  # of the last stage


def test_processes_that_see_unlike_attention_are_refused():
    measured = [Measurement(stats={name: of_process(0)}, numbers={}) for name in "ab"]
    with pytest.raises(InvalidValueError):
        SharedTable(replicas(measured), 0)


def test_partial_values_of_each_kind_make_one_number():
    values, weights = (
        torch.tensor([[3.0, 1.0], [4.0, 5.0]]).double(),
        torch.tensor([[1.0, 0.0], [3.0, 0.0]]).double(),
    )
    expected = {
        "mean": (3 + 12) / 4,
        "root_mean": math.sqrt((9 + 48) / 4),
        "root": 5.0,
        "max": 4.0,
    }
    measured = []
    for value, weight in zip(values, weights):
        numbers = {
            ("a", how): PartialValue(value=value, weight=weight, how=how)
            for how in expected
        }  # type: ignore[arg-type]
        measured.append(Measurement(stats={"a": of_process(0)}, numbers=numbers))
    record = reduced(replicas(measured), measured)
    for how, combined in expected.items():
        first, second = number(record, "a", how)
        assert first == pytest.approx(combined, rel=1e-15)
        assert math.isnan(second)


def test_parts_of_weights_add_up_once_and_are_unknown_if_one_is_missing():
    norms = [
        PartialValue(
            value=torch.ones(3) * i, weight=torch.ones(3), how="root", of="weights"
        )
        for i in (3, 4, 3)
    ]
    measured = [
        Measurement(
            stats={"a": of_process(rank)}, numbers={("a", "query_weight_norm"): norm}
        )
        for rank, norm in enumerate(norms)
    ]
    shards = ("shard 0", "shard 1", "shard 0")
    members = [
        member(of_rank, layout=Layout(data=rank, shard=shard))
        for rank, (of_rank, shard) in enumerate(zip(measured, shards))
    ]
    assert number(reduced(members, measured), "a", "query_weight_norm") == [5.0] * 3
    assert np.isnan(
        number(reduced(members, [*measured[:2], None]), "a", "query_weight_norm")
    ).all()


def test_statistics_by_token_class_are_merged():
    def of_classes(seed):
        g = torch.Generator().manual_seed(seed)
        pairs, single, keys = (HEADS, 2, 2), (HEADS, 2), (KEYS, 2)
        floats = {
            name: torch.rand(pairs, dtype=torch.float64, generator=g)
            for name in ("max_logit", "mass", "uniform_mass")
        }
        floats |= {
            name: torch.rand(single, dtype=torch.float64, generator=g)
            for name in ("query_norm", "query_norm_max")
        }
        floats |= {
            name: torch.rand(keys, dtype=torch.float64, generator=g)
            for name in ("key_norm", "key_norm_max")
        }
        shapes = {
            "n_queries": single,
            "n_pairs": pairs,
            "n_normed": single,
            "n_keys": keys,
        }
        counts = {
            name: torch.randint(0, 9, shape, generator=g)
            for name, shape in shapes.items()
        }
        return ClassStats(names=("image", "text"), **floats, **counts)

    both = [
        LogitStats(**of_process(i).tensors(), classes=of_classes(i)) for i in range(2)
    ]  # type: ignore[arg-type]
    measured = [Measurement(stats={"a": stats}, numbers={}) for stats in both]
    record, expected = reduced(replicas(measured), measured), merge(*both).classes
    assert record is not None
    assert expected is not None
    classes = record.stats["a"].classes
    assert classes is not None
    assert classes.names == expected.names
    for name, values in expected.tensors().items():
        rule = CLASS_MERGES[name]
        counted = expected.tensors()[rule.count] > 0 if rule.count else torch.ones(())
        counted = counted if counted.ndim in (0, values.ndim) else counted[..., None]
        torch.testing.assert_close(
            classes.tensors()[name] * counted, values * counted, rtol=1e-12, atol=0
        )
