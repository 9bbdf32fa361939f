"""What arrives from the device: the record of random measurements is what the definitions say, number by number."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from qkeel.capture.calls import ScoreBlock, SiteStats
from qkeel.functional import statistics
from qkeel.functional.statistics import MERGES, LogitStats
from qkeel.monitor.gather import (
    MADE,
    Arrived,
    Measurement,
    NumberKey,
    PartialValue,
    Transfer,
    merged,
    merged_arrivals,
)
from qkeel.monitor.journal import RecordTable
from qkeel.records import HEAD_FIELDS

SEEDS = range(40)


def random_stats(rng: random.Random, heads: int, kv_heads: int, dtype: torch.dtype) -> LogitStats:
    """Statistics of one site: some heads without pairs, some not finite, some with maxima alone."""

    def numbers(name: str) -> Tensor:
        of_keys = name.startswith(("key_", "n_keys"))
        n = kv_heads if of_keys else heads
        if MERGES[name].how == "sum":
            return torch.tensor([rng.choice([0, 1, 7, 1 << 40]) for _ in range(n)])
        values = [rng.choice([rng.gauss(0, 9), rng.gauss(0, 9), MERGES[name].neutral]) for _ in range(n)]
        if rng.random() < 0.1:
            values[0] = rng.choice([float("nan"), float("inf"), -float("inf")])
        return torch.tensor(values, dtype=dtype)

    error = torch.rand(heads, dtype=dtype) if rng.random() < 0.3 else None
    return LogitStats(**{name: numbers(name) for name in MERGES}, entropy_error=error)  # type: ignore[arg-type]


def random_measurement(rng: random.Random) -> Measurement:
    """Blocks of sites and single numbers, in random forms."""
    dtype = rng.choice([torch.float32, torch.float64])
    blocks, sites = [], []
    for i in range(rng.randint(1, 3)):
        names = tuple(f"{'ab'[rng.random() < 0.5]}{i}.{j}" for j in range(rng.randint(1, 3)))
        groups = [rng.randint(1, 3) for _ in names]
        heads = tuple(g * rng.randint(1, 3) for g in groups)
        stats = random_stats(rng, sum(heads), sum(groups), dtype)
        blocks.append(ScoreBlock(names, heads, tuple(groups), stats))
        sites += zip(names, heads)
    order = [name for name, _ in sites]
    rng.shuffle(order)
    single: dict[NumberKey, Tensor | PartialValue] = {("", "lr"): torch.tensor(0.25, dtype=torch.float64)}
    for site, n in sites:
        for name in ("query_weight_norm", "query_grad_rms", "key_grad_rms"):
            single[site, name] = torch.rand(n, dtype=dtype)
        single[site, "hidden_norm"] = PartialValue(value=torch.rand(()), weight=torch.tensor(3.0))
        if rng.random() < 0.5:
            weight = torch.tensor([float(rng.random() < 0.7) for _ in range(n)])
            single[site, "sink_logit"] = PartialValue(value=torch.rand(n), weight=weight, own=True)
        if rng.random() < 0.5:
            single[site, "eps"] = torch.tensor(rng.random() + 0.1, dtype=dtype)
        if rng.random() < 0.3:
            single[site, "lse_mean"] = PartialValue(value=torch.rand(n), weight=torch.ones(n), own=True)
            single[site, "lse_square"] = PartialValue(value=torch.rand(n) + 1, weight=torch.ones(n), own=True)
    return Measurement(stats=SiteStats(blocks, order), numbers=single)


def by_definition(
    measured: Measurement, sites: tuple[str, ...], width: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The tables and the single numbers, one by one and in Python."""
    numbers: dict[NumberKey, Tensor] = {}
    for key, x in measured.numbers.items():
        numbers[key] = x if isinstance(x, Tensor) else torch.where(x.weight > 0, x.value, torch.nan)
    for name, (parts, only, make) in MADE.items():
        for site in sites:
            known = [numbers.get((site, part)) for part in parts]
            if all(x is not None for x in known):
                numbers[site, name] = make(*[x.double() for x in known if x is not None])
            for part in only:
                numbers.pop((site, part), None)
    tables: dict[str, np.ndarray] = {}

    def put(name: str, site: str, head: int, value: float) -> None:
        tables.setdefault(name, np.full((len(sites), width), np.nan))[sites.index(site), head] = value

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
def test_a_record_is_what_the_definitions_say(seed: int) -> None:
    measured = random_measurement(random.Random(seed))
    sites = tuple(measured.stats)
    width = max(len(s.max_logit) for s in measured.stats.values())
    expected, single = by_definition(measured, sites, width)
    for arrived in (Transfer.alone(measured).result(), Arrived.of(measured)):
        tables, known, values = RecordTable(arrived.packing, sites, width).read(arrived.vector)
        assert list(tables) == [name for name in HEAD_FIELDS if name in expected]
        for name, table in expected.items():
            np.testing.assert_allclose(tables[name], table, rtol=1e-12, err_msg=name)
        assert values == pytest.approx(single, rel=1e-12)
        assert known <= set(tables)
        for site, stats in measured.stats.items():
            for name, x in stats.tensors().items():
                torch.testing.assert_close(
                    arrived.stats[site].tensors()[name].double(), x.double(), rtol=0, atol=0, equal_nan=True
                )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_keeps_the_sites_and_heads_that_it_began_with(seed: int) -> None:
    measured = random_measurement(random.Random(seed))
    arrived = Transfer.alone(measured).result()
    sites = tuple(measured.stats)
    width = max(len(s.max_logit) for s in measured.stats.values())
    whole, _, _ = RecordTable(arrived.packing, sites, width).read(arrived.vector)
    fewer = ("of no measurement", *sites[::2])
    part, _, _ = RecordTable(arrived.packing, fewer, 1).read(arrived.vector)
    for name, table in part.items():
        assert np.isnan(table[0]).all()
        np.testing.assert_array_equal(table[1:], whole[name][::2, :1])


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_a_derived_number_of_key_heads_is_given_to_the_query_heads_of_each(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LogitStats, "key_excess", property(lambda self: self.key_norm_max - self.key_norm), raising=False
    )
    monkeypatch.setattr(statistics, "RECORDED", {*statistics.RECORDED, "key_excess"})
    monkeypatch.setitem(HEAD_FIELDS, "key_excess", HEAD_FIELDS["key_norm"])
    measured = random_measurement(random.Random(seed))
    arrived, sites = Arrived.of(measured), tuple(measured.stats)
    width = max(len(s.max_logit) for s in measured.stats.values())
    tables, _, _ = RecordTable(arrived.packing, sites, width).read(arrived.vector)
    np.testing.assert_allclose(tables["key_excess"], tables["key_norm_max"] - tables["key_norm"], rtol=1e-12)
    expected, _ = by_definition(measured, sites, width)
    np.testing.assert_array_equal(tables["non_finite"], expected["non_finite"])


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_steps_of_one_form_merge_as_any_steps_do(seed: int) -> None:
    rng, measured = random.Random(seed), random_measurement(random.Random(seed))
    steps = []
    for _ in range(5):
        new = []
        for block in SiteStats.of(measured.stats).blocks:
            dtype = block.joint.max_logit.dtype
            joint = random_stats(rng, sum(block.heads), sum(block.kv_heads), dtype)
            while (joint.entropy_error is None) != (block.joint.entropy_error is None):
                joint = random_stats(rng, sum(block.heads), sum(block.kv_heads), dtype)
            new.append(block._replace(joint=joint))
        steps.append(Transfer.alone(Measurement(stats=SiteStats(new, tuple(measured.stats)), numbers={})).result())
    assert len({step.packing for step in steps}) == 1
    stacked, one_by_one = merged_arrivals(steps), merged([step.stats for step in steps])
    assert tuple(stacked) == tuple(one_by_one)
    for site, stats in one_by_one.items():
        for name, x in stats.tensors().items():
            torch.testing.assert_close(stacked[site].tensors()[name], x, rtol=1e-12, atol=0, equal_nan=True)
        each = [step.stats[site].tensors() for step in steps]
        n = torch.stack([x["n_pairs"] for x in each]).double()
        mean = (torch.stack([x["mean_logit"] for x in each]) * n).sum(0) / n.sum(0)
        there = stats.mean_logit.isfinite() & (n.sum(0) > 0)
        torch.testing.assert_close(stacked[site].mean_logit[there], mean[there], rtol=1e-9, atol=1e-9)
