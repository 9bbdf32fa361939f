"""Extremes of all rows are exact; the entropy of a sample is that of its rows, and its interval holds the truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.harness import rows_of
from tests.kernels.test_non_finite import BROKEN, broken_call
from tests.quick import one_in
from torch import Tensor

from qkeel import attention
from qkeel.kernels import contract
from qkeel.kernels.statistics import attend_with_logsumexp, bracket, logit_stats, sampled_stats
from qkeel.kernels.triton import available
from qkeel.spec import AttentionCall, AttentionSpec, Rope, SlidingWindow, Softcap
from qkeel.spec.call import with_query_mask

from .test_statistics import call_of

STUDENT = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 30: 2.0423}
CASES: dict[str, tuple[AttentionSpec, int, int, dict[str, Any]]] = {
    "causal": (AttentionSpec(), 201, 201, {}),
    "fewer queries than keys": (AttentionSpec(position=Rope()), 70, 133, {}),
    "more queries than keys": (AttentionSpec(), 70, 40, {}),
    "full": (AttentionSpec(), 64, 90, {"causal": False}),
    "padding": (AttentionSpec(), 70, 70, {"mask": torch.arange(70) >= torch.tensor([[0], [25]])}),
    "softcap": (AttentionSpec(cap=Softcap(5.0)), 66, 66, {}),
    "window": (AttentionSpec(position=SlidingWindow(window=9)), 150, 150, {}),
}


def of_rows(call: AttentionCall, strata: int, seed: int) -> tuple[available.RowNumbers, Tensor]:
    from qkeel.kernels.triton import statistics

    read = contract._read(call)
    assert read is not None
    return statistics.rows_of(*read[:3], **read.how, cap=call.spec.cap.limit, sample=(strata, seed))


def edges(t: int, strata: int) -> np.ndarray:
    size, more = divmod(t, strata)
    u = np.arange(strata + 1)
    return u * size + np.minimum(u, more)


@pytest.mark.parametrize("name", one_in(CASES, 8))
def test_a_sample_has_the_statistics_of_its_rows_and_the_extremes_those_of_all(
    name: str, through_triton: list[Any]
) -> None:
    spec, t, s, how = CASES[name]
    call, strata = call_of(spec, t, s, torch.float32, **how), t // 9
    true = rows_of(call, True)
    found, picked = of_rows(call, strata, 3)
    index = picked.long()[:, None].expand(-1, 4, -1)
    for field, ours in found._asdict().items():
        there = true[field].gather(2, index)
        assert (((ours - there).abs() <= 5e-6 * (1 + there.abs())) | (ours == there)).all(), field
    first, last = (np.repeat(edges(t, strata)[i : i + strata], 2) for i in (0, 1))
    assert ((picked.numpy() >= first) & (picked.numpy() < last)).all()
    assert (picked[:, ::2] != picked[:, 1::2]).all()
    assert not torch.equal(picked, of_rows(call, strata, 4)[1])
    extremes = contract.extremes(call)
    assert extremes is not None
    for ours, all_rows in zip(extremes, (true["largest"].amax((0, 2)), true["smallest"].amin((0, 2)))):
        torch.testing.assert_close(ours.double(), all_rows, rtol=1e-5, atol=1e-5)


def interval(y: Tensor, counted: Tensor, sizes: np.ndarray, widest: float) -> tuple[np.ndarray, np.ndarray]:
    """Means and errors from the entropies of two rows of each stratum, [draws n 2], and whether they count."""
    d = counted.double().numpy()
    values = y.double().numpy() * d
    n, rows = (sizes * d.sum(-1)).sum(-1) / 2, d.sum((-1, -2))
    mean = (sizes * values.sum(-1)).sum(-1) / 2 / n
    apart = (values - d * mean[..., None, None]) @ np.array([1, -1])
    v = sizes * (sizes - 2) * apart**2 / 4
    df = np.maximum(1.0, v.sum(-1) ** 2 / np.maximum((v**2).sum(-1), 1e-30))
    t = np.interp(1 / df, [0, *(1 / n for n in reversed(STUDENT))], [1.96, *reversed(STUDENT.values())])
    rare = (1 - rows / n) * np.minimum(1.0, 2.9957 / rows)
    return mean, t * np.sqrt(v.sum(-1)) / n + rare * np.maximum(mean, widest - mean)


def populations(t: int) -> dict[str, Tensor]:
    """Entropies of t rows, [t], of at most ln t."""
    n, draw = torch.arange(1, t + 1.0), torch.Generator().manual_seed(5)
    high, some = math.log(t), torch.rand(t, generator=draw)
    return {
        "as a causal mask makes them": n.log() * (0.6 + 0.4 * some),
        "rare rows are flat": torch.where(some < 0.01, high, 0.05 * some),
        "rare rows collapse": torch.where(some < 0.01, 0.0, 0.8 * high + 0.1 * some),
        "heavy tails": (0.01 / (1 - some)).clamp_max(high),
        "two kinds": torch.where(some < 0.5, 0.1, high),
        "one of 300 rows": torch.where(n % 300 == 7, high, 0.0),
        "a step": torch.where(n > 0.7 * t, high, 0.5),
    }


@pytest.mark.slow
def test_95_of_100_intervals_hold_the_truth_on_heavy_tails_and_rare_rows_too(through_triton: list[Any]) -> None:
    from qkeel.kernels.triton import statistics

    draw, draws = np.random.default_rng(1), 2000
    for t, rate in ((1024, 16), (4096, 32)):
        strata, rows = t // (2 * rate), 2 * rate
        one = draw.integers(rows, size=(draws, strata))
        other = (one + 1 + draw.integers(rows - 1, size=one.shape)) % rows
        picked = torch.from_numpy(np.stack([one, other], -1) + edges(t, strata)[:-1, None])
        for name, population in populations(t).items():
            y = population[picked]
            mean, error = interval(y, torch.ones_like(y), np.full(strata, rows), math.log(t))
            covered = (abs(mean - float(population.double().mean())) <= error).mean()
            assert covered >= 0.94, (name, covered)
            few, tops = y[None, :3].flatten(2).float(), torch.zeros(1, 3, 1)
            empty = torch.zeros(1, 2 * strata, dtype=torch.int32)
            found = statistics.sampled_head_numbers(
                (tops, tops), (torch.zeros_like(few), few, empty), t, math.log(t), None
            )
            assert found.error is not None
            np.testing.assert_allclose(found.entropy.numpy(), mean[:3], rtol=1e-4)
            np.testing.assert_allclose(found.error.numpy(), error[:3], rtol=0.03)


def test_intervals_with_rows_that_do_not_count(through_triton: list[Any]) -> None:
    from qkeel.kernels.triton import statistics

    t, strata = 205, 20
    picked = torch.stack([torch.from_numpy(edges(t, strata)[:-1] + i) for i in (0, 1)], 1).flatten()
    picked = picked.expand(2, -1).to(torch.int32).contiguous()
    y, lse, counted = torch.rand(2, 3, 40), torch.zeros(2, 3, 40), torch.rand(2, t) < 0.6
    lse[:, 1, 7] = -torch.inf  # sees no key
    tops = torch.zeros(2, 3, 4)
    found = statistics.sampled_head_numbers((tops, tops), (lse, y, picked), t, 3.0, counted)
    over = counted.gather(1, picked.long())[:, None] & (lse != -torch.inf)
    sizes = np.tile(np.diff(edges(t, strata)), 2)
    assert found.error is not None
    values, seen = (x.transpose(0, 1).reshape(3, -1, 2) for x in (y, over))
    mean, error = interval(values, seen, sizes, 3.0)
    np.testing.assert_allclose(found.entropy.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(found.error.numpy(), error, rtol=0.03)
    nothing = statistics.sampled_head_numbers(
        (tops, tops), (torch.full_like(lse, -torch.inf), y, picked), t, 3.0, counted
    )
    assert nothing.entropy.tolist() == [0, 0, 0]
    assert nothing.n.tolist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, which multiplies for the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", one_in(BROKEN, 4))
def test_what_is_no_number_reaches_every_statistic_though_its_row_is_not_in_the_sample(
    kind: str, through_triton: list[Any]
) -> None:
    call, told = broken_call(kind, AttentionSpec()), torch.tensor([h in BROKEN[kind] for h in range(4)])
    for _ in range(4):  # other rows each time
        found = sampled_stats(call, 4)
        assert found is not None
        assert torch.equal(~found.entropy.isfinite(), told)
        assert torch.equal(~found.entropy_error.isfinite(), told)
        assert torch.equal(found.non_finite == 1, told)
    pair = attend_with_logsumexp(call)
    assert pair is not None
    ends = torch.stack(contract.lse_bounds(call, pair[1]))
    assert not ends[:, told].isfinite().all()
    assert ends[:, ~told].isfinite().all()


@pytest.mark.slow
def test_tiles_that_the_logsumexps_rule_out_are_not_read_and_the_largest_logit_is_the_same(
    through_triton: list[Any],
) -> None:
    from qkeel.kernels.triton import statistics

    for size, causal in ((1.0, True), (40.0, False)):
        call = call_of(AttentionSpec(), 150, 150, torch.float32, size, causal=causal)
        counted = torch.rand(2, 150) < 0.7
        for one in (call, with_query_mask(call, counted)):
            pair = attend_with_logsumexp(one)
            assert pair is not None
            lse, true = pair[1], logit_stats(one)
            ends = contract.lse_bounds(one, lse)
            plain = bracket(one, lse, "max")
            assert (ends[0] <= true.max_logit * (1 + 1e-6)).all()
            assert (true.max_logit <= ends[1] * (1 + 1e-6)).all()
            assert (ends[1] >= plain.upper * (1 - 1e-6)).all()
            heads = contract.sampled_numbers(one, 16, lse)
            assert heads is not None
            torch.testing.assert_close(heads.largest, true.max_logit, rtol=1e-5, atol=1e-5)
        q, k = one.q, one.k
        tops, _ = statistics.extremes(q, k, q.shape[-1] ** -0.5, causal=causal, known=(lse, ends[0]))
        assert (tops == -torch.inf).any() == (size == 40.0)


def test_attention_gives_a_sample_and_its_error_and_says_so(
    through_triton: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for mask in (None, torch.ones(2, 80, dtype=torch.bool)):
        call = call_of(AttentionSpec(position=Rope()), 80, 80, torch.float32, mask=mask)
        given = {"spec": call.spec, "mask": mask}
        _, found = attention(call.q, call.k, call.v, **given, stats="entropy:sample=16")  # type: ignore[call-overload]
        exact = logit_stats(call)
        torch.testing.assert_close(found.upper, exact.max_logit, rtol=1e-5, atol=1e-5)
        assert found.entropy_error is not None
        assert found.entropy is not None
        assert ((found.entropy - exact.entropy).abs() <= found.entropy_error).all()
        assert ("from a sample of rows" in found.note) == (mask is not None)
    monkeypatch.setattr(available, "usable", lambda device: False)
    _, plain = attention(call.q, call.k, call.v, spec=call.spec, stats="entropy:sample=16")
    assert plain.entropy_error is None
    assert plain.entropy is not None
    torch.testing.assert_close(plain.entropy, exact.entropy, rtol=1e-4, atol=1e-5)
