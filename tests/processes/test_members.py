"""What the vectors of many processes reduce to is what merging their statistics one by one gives."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qkeel.distributed.reduce import Member, SharedTable
from qkeel.errors import InvalidValueError
from qkeel.functional.class_statistics import MERGES as CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import MERGES, LogitStats, merge
from qkeel.monitor import Layout
from qkeel.monitor.numbers import Number
from qkeel.monitor.step_vector import CLASS_DIMENSIONS, StepVector, flatten, vector_of

HEADS, KEYS = 3, 2


def of_process(seed, n=HEADS):
    """Random statistics."""
    g = torch.Generator().manual_seed(seed)
    values = {}
    for name, rule in MERGES.items():
        shape = [KEYS if name.startswith(("key_", "n_keys")) else n]
        if rule.how == "sum":
            values[name] = torch.randint(1, 10**12, shape, generator=g)
        else:
            values[name] = torch.rand(shape, dtype=torch.float64, generator=g)
    return LogitStats(**values)


def measured_by(world, numbers=lambda rank: {}):
    """The statistics and numbers of processes that saw one site."""
    return [({"a": of_process(rank)}, numbers(rank)) for rank in range(world)]


def members_of(measured, fields):
    """Processes, as they describe themselves."""
    return [
        Member(
            form=() if of_rank is None else flatten(*of_rank)[0].form,
            parameters={"": 1},
            **of_member,
        )
        for of_rank, of_member in zip(measured, fields, strict=True)
    ]


def on_host(table, vector):
    return StepVector(table, torch.from_numpy(vector))


def reduced(members, measured):
    """What every process reads of the vectors that all of them send."""
    tables = [SharedTable(members, rank) for rank in range(len(members))]
    sent = []
    for table, of_rank in zip(tables, measured, strict=True):
        vector = None if of_rank is None else vector_of(flatten(*of_rank)[1]).numpy()
        sent.append(table.split(vector))
    largest, sums = map(np.stack, zip(*sent))
    everywhere = [table.join(largest.max(0), sums.sum(0)) for table in tables]
    for vector in everywhere:
        np.testing.assert_array_equal(vector, everywhere[0])
    return None if everywhere[0] is None else on_host(tables[0].table, everywhere[0])


def replicas(measured):
    """Data-parallel processes; None has no numbers when all meet."""
    layouts = [{"layout": Layout(data=rank)} for rank in range(len(measured))]
    return members_of(measured, layouts)


def number(record, site, name):
    columns = {(*x.sites, x.name): x for x in record.table.form}
    return record.vector[record.table.indices(columns[site, name])][0].tolist()


def close(merged, expected):
    for name, values in merged.tensors().items():
        theirs = expected.tensors()[name].to(values.dtype)
        assert_close(values, theirs, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 5),
    st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1e300]), max_size=3),
)
def test_the_reduction_is_the_merge(world, odd):
    measured = measured_by(world)
    for i, value in enumerate(odd):
        for name in ("max_logit", "min_logit", "entropy_min"):
            measured[i % world][0]["a"].tensors()[name][0] = value
    expected = merge(*(stats["a"] for stats, _ in measured))
    close(reduced(replicas(measured), measured).stats()["a"], expected)
    # Steps are merged as processes are.
    tables, vectors = zip(*[flatten(*of_rank) for of_rank in measured])
    steps = tables[0].merge([vector_of(x).numpy() for x in vectors])
    close(on_host(tables[0], steps).stats()["a"], expected)


def test_a_process_without_numbers_changes_nothing():
    measured = measured_by(2)
    record = reduced(replicas([*measured, None, None]), [*measured, None, None])
    close(record.stats()["a"], merge(*(stats["a"] for stats, _ in measured)))
    assert reduced(replicas(measured), [None, None]) is None


def test_heads_that_are_split_stand_next_to_each_other_and_copies_count_once():
    measured = measured_by(2) * 2
    layouts = [Layout(data=0, head_part=part, head_parts=2) for part in (0, 1, 0, 1)]
    splits = {"a": (True, False)}
    members = members_of(
        measured, [{"layout": layout, "splits": splits} for layout in layouts]
    )
    stats = reduced(members, measured).stats()["a"]
    parts = [of_rank["a"] for of_rank, _ in measured[:2]]
    for name in ("n_pairs", "max_logit"):
        both = torch.cat([part.tensors()[name] for part in parts])
        assert torch.equal(stats.tensors()[name], both)
    # All have the same keys, which are counted once.
    assert torch.equal(stats.n_keys, parts[0].n_keys)
    facts = {"head_dim": 0, "weights": "unknown", "name": "a"}
    about = {"sites": [{**facts, "n_heads": 2 * HEADS, "n_kv_heads": KEYS}]}
    assert SharedTable(members, 0).about() == {**about, "parameters": 1}


def test_the_queries_of_a_context_add_up_and_the_keys_of_whoever_saw_most_count():
    measured = measured_by(2)
    members = members_of(
        measured,
        [{"layout": Layout(context=rank), "keys_seen": rank} for rank in (0, 1)],
    )
    stats = reduced(members, measured).stats()["a"]
    first, second = (of_rank["a"] for of_rank, _ in measured)
    assert torch.equal(stats.n_queries, first.n_queries + second.n_queries)
    assert torch.equal(stats.key_norm, second.key_norm)


def test_stages_of_equal_names_are_told_apart_by_their_number():
    def numbers(stage):
        norm = torch.ones(3) * stage
        return {("", "train_loss"): torch.tensor(stage), ("a", "key_grad_rms"): norm}

    measured = measured_by(2, numbers)
    members = members_of(
        measured, [{"layout": Layout(stage=stage)} for stage in (0, 1)]
    )
    record = reduced(members, measured)
    assert [*record.stats()] == ["stages.0.a", "stages.1.a"]
    assert number(record, "stages.1.a", "key_grad_rms") == [1.0] * 3
    # Of the last stage.
    assert number(record, "", "train_loss") == 1.0


def test_processes_that_see_unlike_attention_are_refused():
    measured = [({name: of_process(0)}, {}) for name in "ab"]
    with pytest.raises(InvalidValueError):
        SharedTable(replicas(measured), 0)


def test_partial_values_of_each_kind_make_one_number():
    values = torch.tensor([[3.0, 1.0], [4.0, 5.0]]).double()
    weights = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).double()
    expected = {
        "mean": (3 + 12) / 4,
        "root_mean": math.sqrt((9 + 48) / 4),
        "root": 5.0,
        "max": 4.0,
    }
    measured = measured_by(
        2,
        lambda rank: {
            ("a", how): Number(values[rank], weights[rank], how) for how in expected
        },
    )
    record = reduced(replicas(measured), measured)
    for how, combined in expected.items():
        first, second = number(record, "a", how)
        assert first == pytest.approx(combined, rel=1e-15)
        assert math.isnan(second)


def test_parts_of_weights_add_up_once_and_are_unknown_if_one_is_missing():
    def numbers(rank):
        norm = Number(torch.ones(3) * (3, 4, 3)[rank], 1, "root", "weights")
        return {("a", "query_weight_norm"): norm}

    measured = measured_by(3, numbers)
    shards = ("shard 0", "shard 1", "shard 0")
    layouts = [Layout(data=i, shard=shard) for i, shard in enumerate(shards)]
    members = members_of(measured, [{"layout": layout} for layout in layouts])
    norms = [
        number(reduced(members, sent), "a", "query_weight_norm")
        for sent in (measured, [*measured[:2], None])
    ]
    assert norms[0] == [5.0] * 3
    assert np.isnan(norms[1]).all()


def test_statistics_by_token_class_are_merged():
    def of_classes(seed):
        g = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, rule in CLASS_MERGES.items():
            heads = KEYS if name.startswith(("key_", "n_keys")) else HEADS
            shape = (heads, *[2] * CLASS_DIMENSIONS[name])
            if rule.how == "sum":
                tensors[name] = torch.randint(0, 9, shape, generator=g)
            else:
                tensors[name] = torch.rand(shape, dtype=torch.float64, generator=g)
        return ClassStats(names=("image", "text"), **tensors)

    both = [
        LogitStats(**of_process(i).tensors(), classes=of_classes(i)) for i in range(2)
    ]
    measured = [({"a": stats}, {}) for stats in both]
    classes = reduced(replicas(measured), measured).stats()["a"].classes
    expected = merge(*both).classes
    assert classes.names == expected.names
    for name, values in expected.tensors().items():
        count = CLASS_MERGES[name].count or {"max_logit": "n_pairs"}.get(name, "")
        counted = expected.tensors()[count] > 0 if count else torch.tensor(True)
        counted = counted if counted.ndim in (0, values.ndim) else counted[..., None]
        assert_close(
            classes.tensors()[name].where(counted, 0.0).to(values.dtype),
            values.where(counted, 0.0).to(values.dtype),
            rtol=1e-12,
            atol=0,
        )
