"""What arrives from the device: the record of random measurements is what the definitions say, number by number."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from qkeel.functional.statistics import MERGES, LogitStats
from qkeel.monitor.gather import (
    Measurement,
    NumberKey,
    PartialValue,
    Transfer,
)
from qkeel.monitor.record_arrays import COMPUTED, RecordArrays
from qkeel.records import HEAD_FIELDS

SEEDS = range(20)


def random_stats(rng, heads, kv_heads, dtype):
    """Statistics of one site: some heads without pairs, some not finite, some with maxima alone."""

    def numbers(name):
        of_keys = name.startswith(("key_", "n_keys"))
        n = kv_heads if of_keys else heads
        if MERGES[name].how == "sum":
            return torch.tensor([rng.choice([0, 1, 7, 1 << 40]) for _ in range(n)])
        values = [
            rng.choice([rng.gauss(0, 9), rng.gauss(0, 9), MERGES[name].neutral])
            for _ in range(n)
        ]
        if rng.random() < 0.1:
            values[0] = rng.choice([float("nan"), float("inf"), -float("inf")])
        return torch.tensor(values, dtype=dtype)

    return LogitStats(**{name: numbers(name) for name in MERGES})  # type: ignore[arg-type]


def random_measurement(rng):
    """Sites and single numbers, in random forms."""
    dtype = rng.choice([torch.float32, torch.float64])
    stats: dict[str, LogitStats] = {}
    single: dict[NumberKey, Tensor | PartialValue] = {
        ("", "lr"): torch.tensor(0.25, dtype=torch.float64)
    }
    for i in range(rng.randint(1, 6)):
        site, groups = f"{'ab'[rng.random() < 0.5]}{i}", rng.randint(1, 3)
        n = groups * rng.randint(1, 3)
        stats[site] = random_stats(rng, n, groups, dtype)
        for name in ("query_weight_norm", "query_grad_rms", "key_grad_rms"):
            single[site, name] = torch.rand(n, dtype=dtype)
        single[site, "hidden_norm"] = PartialValue(
            value=torch.rand(()), weight=torch.tensor(3.0)
        )
        if rng.random() < 0.5:
            weight = torch.tensor([float(rng.random() < 0.7) for _ in range(n)])
            single[site, "sink_logit"] = PartialValue(
                value=torch.rand(n), weight=weight, own=True
            )
        if rng.random() < 0.5:
            single[site, "eps"] = torch.tensor([rng.random() + 0.1], dtype=dtype)
        if rng.random() < 0.3:
            single[site, "lse_mean"] = PartialValue(
                value=torch.rand(n), weight=torch.ones(n), own=True
            )
            single[site, "lse_square"] = PartialValue(
                value=torch.rand(n) + 1, weight=torch.ones(n), own=True
            )
    return Measurement(stats=stats, numbers=single)


def record_of(measured):
    record = Transfer.alone(measured).result()
    assert record is not None
    return record


def by_definition(measured, sites, width):
    """The tables and the single numbers, one by one and in Python."""
    numbers: dict[NumberKey, Tensor] = {}
    for key, x in measured.numbers.items():
        numbers[key] = (
            x
            if isinstance(x, Tensor)
            else torch.where(x.weight > 0, x.value, torch.nan)
        )
    for name, (parts, compute) in COMPUTED.items():
        for site in sites:
            known = [
                x.double().numpy()
                for part in parts
                if (x := numbers.get((site, part))) is not None
            ]
            if len(known) == len(parts):
                numbers[site, name] = torch.from_numpy(compute(*known))
            for part in {*parts}.difference(HEAD_FIELDS):
                numbers.pop((site, part), None)
    tables: dict[str, np.ndarray] = {}

    def put(name, site, head, value):
        tables.setdefault(name, np.full((len(sites), width), np.nan))[
            sites.index(site), head
        ] = value

    for site, stats in measured.stats.items():
        for name, field in HEAD_FIELDS.items():
            values, counts = stats.value(name), getattr(stats, field.count, None)
            if values is None or counts is None:
                continue
            for head in range(len(stats.max_logit)):
                i, j = (head * len(x) // len(stats.max_logit) for x in (values, counts))
                there = bool(counts[j] > 0)
                if name in ("max_logit", "non_finite"):
                    there |= bool(stats.max_logit[head] != -torch.inf)
                elif name == "capped_max_logit":
                    there |= bool(stats.capped_max_logit[head] != -torch.inf)
                put(name, site, head, float(values[i].double()) if there else np.nan)
    single: dict[str, float] = {}
    for (site, name), x in numbers.items():
        if not x.ndim:
            single[f"{name}/{site}" if site else name] = float(x)
        elif name in HEAD_FIELDS:
            for head, value in enumerate(x.double().tolist()):
                put(name, site, head, value)
    return tables, single


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_is_what_the_definitions_say(seed):
    measured = random_measurement(random.Random(seed))
    sites = tuple(measured.stats)
    width = max(len(s.max_logit) for s in measured.stats.values())
    expected, single = by_definition(measured, sites, width)
    record = record_of(measured)
    tables, known, values = RecordArrays(record.table, sites, width).read(record.vector)
    assert list(tables) == [name for name in HEAD_FIELDS if name in expected]
    for name, table in expected.items():
        np.testing.assert_allclose(tables[name], table, rtol=1e-12, err_msg=name)
    assert values == pytest.approx(single, rel=1e-12)
    assert known <= set(tables)
    for site, stats in measured.stats.items():
        for name, x in stats.tensors().items():
            ours = record.stats[site].tensors()[name]
            torch.testing.assert_close(
                ours.double(), x.double(), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_keeps_the_sites_and_heads_that_it_began_with(seed):
    measured = random_measurement(random.Random(seed))
    record = record_of(measured)
    sites = tuple(measured.stats)
    width = max(len(s.max_logit) for s in measured.stats.values())
    whole, _, _ = RecordArrays(record.table, sites, width).read(record.vector)
    fewer = ("of no measurement", *sites[::2])
    part, _, _ = RecordArrays(record.table, fewer, 1).read(record.vector)
    for name, table in part.items():
        assert np.isnan(table[0]).all()
        np.testing.assert_array_equal(table[1:], whole[name][::2, :1])
