"""What the vectors of many processes reduce to is what merging their statistics one by one gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.test_several_models import reduced
from torch import Tensor

from qkeel.functional.class_statistics import MERGES as CLASS_MERGES
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import MERGES, LogitStats, merge
from qkeel.monitor import Layout
from qkeel.monitor.gather import Measurement, PartialValue
from qkeel.monitor.processes import Extent, Members, RankInfo
from qkeel.records import MONITOR_EXTREMES

HEADS, KEYS = 3, 2


def of_process(seed: int, *, even: bool, fields: tuple[str, ...] = tuple(MERGES)) -> LogitStats:
    """Random statistics of some fields, the others neutral."""
    g = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, rule in MERGES.items():
        shape = [KEYS if name.startswith(("key_", "n_keys")) else HEADS]
        if name not in fields:
            values[name] = torch.full(shape, rule.neutral, dtype=torch.int64 if rule.how == "sum" else torch.float64)
        elif rule.how == "sum":
            count = torch.randint(1, 10**12, shape, generator=g)
            values[name] = count[:1].expand(shape).clone() if even else count
        else:
            values[name] = torch.rand(shape, dtype=torch.float64, generator=g)
    return LogitStats(**values)  # type: ignore[arg-type]


def members(measured: list[Measurement], *, others: int = 0) -> list[Members]:
    """Data-parallel processes, of which the last had nothing to send when all met."""
    infos = [
        RankInfo(
            layout=Layout(data=i),
            form=m.form(),
            split={"a": (False, False)},
            about={"sites": [{"name": "a"}], "parameters": {"": 1}},
            extent=Extent.of(m.stats),
        )
        for i, m in enumerate(measured)
    ]
    infos += [RankInfo(layout=Layout(data=len(infos)), about=infos[0].about) for _ in range(others)]
    infos = [RankInfo.of(*info.words()) for info in infos]
    return [Members(infos, rank) for rank in range(len(infos))]


def close(found: LogitStats, expected: LogitStats) -> None:
    for name, x in found.tensors().items():
        theirs = expected.tensors()[name].to(x.dtype)
        torch.testing.assert_close(x, theirs, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.booleans(), st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1e300]), max_size=3))
def test_the_reduction_is_the_merge(world: int, even: bool, odd: list[float]) -> None:
    measured = [Measurement(stats={"a": of_process(i, even=even)}, numbers={}) for i in range(world)]
    for i, x in enumerate(odd):
        for name in ("max_logit", "min_logit", "entropy_min", "key_norm_max"):
            measured[i % world].stats["a"].tensors()[name][0] = x
    expected = measured[0].stats["a"]
    for other in measured[1:]:
        expected = merge(expected, other.stats["a"])
    all_members = members(measured)
    assert all_members[0].extent.even == even
    close(reduced(all_members, [*measured]).stats["a"], expected)


def test_a_process_without_numbers_changes_nothing() -> None:
    measured = [Measurement(stats={"a": of_process(i, even=False)}, numbers={}) for i in range(2)]
    found = reduced(members(measured, others=2), [*measured, None, None])
    close(found.stats["a"], merge(measured[0].stats["a"], measured[1].stats["a"]))
    assert not reduced(members(measured), [None, None]).stats


def test_entropies_alone_take_16_bytes_for_each_head() -> None:
    fields = ("max_logit", "capped_max_logit", "entropy", "entropy_min", "n_queries")
    measured = []
    for i in range(2):
        s = of_process(i, even=True, fields=fields)
        single = {name: x.float() if x.is_floating_point() else x for name, x in s.tensors().items()}
        measured.append(Measurement(stats={"a": LogitStats(**single)}, numbers={}))  # type: ignore[arg-type]
    of_all = members(measured)
    sent = of_all[0].pack(measured[0], {})
    flags, count = (3 + len(MONITOR_EXTREMES)) * 4 + 8, 8
    assert sum(x.numel() * x.itemsize for x in sent) == 16 * HEADS + flags + count
    found, expected = reduced(of_all, [*measured]).stats["a"], merge(measured[0].stats["a"], measured[1].stats["a"])
    for name, x in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name].to(x.dtype), x, rtol=1e-6, atol=0)


NEEDS_MORE = {
    "another field": {"min_logit": 0.0},
    "unlike counts": {"n_pairs": 7},
}


@pytest.mark.parametrize("case", NEEDS_MORE)
def test_a_step_that_needs_more_is_dropped_and_the_next_is_whole(case: str) -> None:
    fields = tuple(name for name in MERGES if name != "min_logit")
    measured = [Measurement(stats={"a": of_process(i, even=True, fields=fields)}, numbers={}) for i in range(2)]
    of_all = members(measured)
    assert set(of_all[0].extent.fields) == {*fields}
    (name, value) = next(iter(NEEDS_MORE[case].items()))
    measured[1].stats["a"].tensors()[name][0] = value
    with pytest.warns(UserWarning, match="is not recorded"):
        assert not reduced(of_all, [*measured]).stats
    close(reduced(of_all, [*measured]).stats["a"], merge(measured[0].stats["a"], measured[1].stats["a"]))


def test_partial_values_of_each_kind_make_one_number() -> None:
    values, weights = torch.tensor([[3.0, 1.0], [4.0, 5.0]]).double(), torch.tensor([[1.0, 0.0], [3.0, 0.0]]).double()
    expected = {
        "mean": (3 + 12) / 4,
        "root_mean": math.sqrt((9 + 48) / 4),
        "root": 5.0,
        "max": 4.0,
    }
    hows = {how: [PartialValue(value=v, weight=w, how=how) for v, w in zip(values, weights)] for how in expected}  # type: ignore[arg-type]
    measured = [
        Measurement(stats={"a": of_process(i, even=True)}, numbers={("a", how): x[i] for how, x in hows.items()})
        for i in range(2)
    ]
    found = reduced(members(measured), [*measured]).numbers
    for how, x in expected.items():
        known, unknown = found["a", how].tolist()  # type: ignore[union-attr]
        assert known == pytest.approx(x, rel=1e-15)
        assert math.isnan(unknown)


def test_a_part_of_the_weights_that_is_missing_makes_their_numbers_unknown() -> None:
    norms = [PartialValue(value=torch.ones(3), weight=torch.ones(3), how="root", of="weights") for _ in range(2)]
    measured = [
        Measurement(stats={"a": of_process(i, even=True)}, numbers={("a", "query_weight_norm"): norms[i]})
        for i in range(2)
    ]
    of_all = members(measured)
    assert bool(reduced(of_all, [measured[0], None]).numbers["a", "query_weight_norm"].isnan().all())  # type: ignore[union-attr]


def test_statistics_by_token_class_are_merged() -> None:
    def of_classes(seed: int) -> ClassStats:
        g = torch.Generator().manual_seed(seed)
        pairs, single, keys = (HEADS, 2, 2), (HEADS, 2), (KEYS, 2)
        floats = {
            name: torch.rand(pairs, dtype=torch.float64, generator=g) for name in ("max_logit", "mass", "uniform_mass")
        }
        floats |= {
            name: torch.rand(single, dtype=torch.float64, generator=g) for name in ("query_norm", "query_norm_max")
        }
        floats |= {name: torch.rand(keys, dtype=torch.float64, generator=g) for name in ("key_norm", "key_norm_max")}
        shapes = {"n_queries": single, "n_pairs": pairs, "n_normed": single, "n_keys": keys}
        counts = {name: torch.randint(0, 9, shape, generator=g) for name, shape in shapes.items()}
        return ClassStats(names=("image", "text"), **floats, **counts)

    plain = [of_process(i, even=True) for i in range(2)]
    both = [LogitStats(**s.tensors(), classes=of_classes(i)) for i, s in enumerate(plain)]  # type: ignore[arg-type]
    measured = [Measurement(stats={"a": s}, numbers={}) for s in both]
    found, expected = reduced(members(measured), [*measured]).stats["a"].classes, merge(*both).classes
    assert found is not None
    assert expected is not None
    assert found.names == expected.names
    for name, x in expected.tensors().items():
        seen = expected.tensors()[rule.count] > 0 if (rule := CLASS_MERGES[name]).count else torch.ones(())
        seen = seen if seen.ndim in (0, x.ndim) else seen[..., None]
        torch.testing.assert_close(found.tensors()[name] * seen, x * seen, rtol=1e-12, atol=0)
