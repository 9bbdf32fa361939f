"""What arrives from the device: the record of random measurements is what the definitions say, number by number."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from qkeel.functional.statistics import MERGES, LogitStats
from qkeel.monitor.gather import Transfer
from qkeel.monitor.numbers import Number, NumberKey
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

    tensors = {name: numbers(name) for name in MERGES}
    # A head without rows has no products and no entropy.
    has_rows = tensors["n_queries"] > 0
    tensors["n_products"] *= has_rows
    tensors["entropy"] = tensors["entropy"].where(has_rows, 0.0)
    return LogitStats(**tensors)  # type: ignore[arg-type]


def random_measurement(rng):
    """Sites and single numbers, in random forms."""
    dtype = rng.choice([torch.float32, torch.float64])
    stats: dict[str, LogitStats] = {}
    single: dict[NumberKey, Tensor | Number] = {
        ("", "lr"): torch.tensor(0.25, dtype=torch.float64)
    }
    for i in range(rng.randint(1, 6)):
        site, groups = f"{'ab'[rng.random() < 0.5]}{i}", rng.randint(1, 3)
        n = groups * rng.randint(1, 3)
        stats[site] = random_stats(rng, n, groups, dtype)
        for name in ("query_weight_norm", "query_grad_rms", "key_grad_rms"):
            single[site, name] = torch.rand(n, dtype=dtype)
        single[site, "hidden_norm"] = Number(torch.rand(()), 3)
        if rng.random() < 0.5:
            weight = torch.tensor([float(rng.random() < 0.7) for _ in range(n)])
            single[site, "sink_logit"] = Number(torch.rand(n), weight, own=True)
        if rng.random() < 0.5:
            single[site, "eps"] = torch.tensor([rng.random() + 0.1], dtype=dtype)
        if rng.random() < 0.3:
            single[site, "lse_mean"] = Number(torch.rand(n), 1, own=True)
            single[site, "lse_square"] = Number(torch.rand(n) + 1, 1, own=True)
    return stats, single


def record_of(measured):
    record = Transfer.alone(*measured).result()
    assert record is not None
    return record


def by_definition(measured, sites, width):
    """The tables and the single numbers, one by one and in Python."""
    numbers: dict[NumberKey, Tensor] = {}
    for key, x in measured[1].items():
        numbers[key] = (
            x
            if isinstance(x, Tensor)
            else torch.where(torch.as_tensor(x.weight) > 0, x.value, torch.nan)
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

    for site, stats in measured[0].items():
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
    sites = tuple(measured[0])
    width = max(len(s.max_logit) for s in measured[0].values())
    expected, single = by_definition(measured, sites, width)
    record = record_of(measured)
    tables, values = RecordArrays(record.table, sites, width).read(record.vector)
    assert list(tables) == [name for name in HEAD_FIELDS if name in expected]
    for name, table in expected.items():
        np.testing.assert_allclose(tables[name], table, rtol=1e-12, err_msg=name)
    whole = {name: x for name, x in values.items() if name not in HEAD_FIELDS}
    assert whole == pytest.approx(single, rel=1e-12)
    for site, stats in measured[0].items():
        for name, x in stats.tensors().items():
            ours = record.stats()[site].tensors()[name]
            torch.testing.assert_close(
                ours.double(), x.double(), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_keeps_the_sites_and_heads_that_it_began_with(seed):
    measured = random_measurement(random.Random(seed))
    record = record_of(measured)
    sites = tuple(measured[0])
    width = max(len(s.max_logit) for s in measured[0].values())
    whole, _ = RecordArrays(record.table, sites, width).read(record.vector)
    fewer = ("of no measurement", *sites[::2])
    part, _ = RecordArrays(record.table, fewer, 1).read(record.vector)
    for name, table in part.items():
        assert np.isnan(table[0]).all()
        np.testing.assert_array_equal(table[1:], whole[name][::2, :1])
