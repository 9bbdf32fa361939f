"""Statistics of sampled queries: right in the mean, bounds where they must be, exact when all queries are taken."""

from __future__ import annotations

import pytest
import torch
from tests.quick import quick
from torch import Tensor

from qkeel import preset
from qkeel.errors import InvalidValueError
from qkeel.functional.statistics.logit_stats import TENSORS
from qkeel.functional.statistics.sampling import chosen_rows
from qkeel.kernels.stats.per_head import logit_stats, sampled_stats
from qkeel.spec import AttentionCall
from qkeel.spec.call import make_call, with_query_mask

FIELDS = list(TENSORS)
KEYS = [name for name in FIELDS if "key" in name]
DRAWS = 120


def call_of(t: int, name: str = "qwen3", **how: object) -> AttentionCall:
    rng = torch.Generator().manual_seed(1)
    q, k = (2 * torch.randn(2, heads, t, 8, dtype=torch.float64, generator=rng) for heads in (4, 2))
    q = q * torch.linspace(0.5, 2, t, dtype=torch.float64)[:, None]  # late rows are not like early ones
    params = {n: p.double() for n, p in preset(name).init_params(4, 2, 8).items()}
    return make_call(preset(name), q, k, k, params=params, **how)  # type: ignore[arg-type]


def draws_of(call: AttentionCall, n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = [sampled_stats(call, n, generator=generator, threshold=2.0) for _ in range(DRAWS)]
    return {name: torch.stack([getattr(stats, name) for stats in found]) for name in FIELDS}


def assert_mean(draws: Tensor, truth: Tensor, name: str) -> None:
    draws, truth = draws.double(), truth.double()
    error = draws.std(0) / DRAWS**0.5
    assert ((draws.mean(0) - truth).abs() <= 4 * error + 1e-12 * truth.abs()).all(), f"{name}: {draws.mean(0)} {truth}"


def test_rows_are_drawn_equally_often_and_one_from_each_stretch() -> None:
    generator = torch.Generator().manual_seed(0)
    for t, n in ((10, 3), (10, 7), (64, 8), (7, 1)):
        draws = torch.stack([chosen_rows(t, n, generator) for _ in range(4000)])  # type: ignore[misc]
        assert (draws.diff(dim=1) >= 0).all()
        stretch = torch.arange(n)
        assert (draws >= (stretch * t / n).floor()).all()
        assert (draws < ((stretch + 1) * t / n).ceil()).all()
        often = draws.flatten().bincount(minlength=t).double() / 4000
        assert ((often - n / t).abs() < 5 * (n / t / 4000) ** 0.5).all()


@pytest.mark.parametrize(
    ("name", "n"), quick([("qwen3", 3), ("gemma2", 8), ("cosa_logn", 8)], lambda case: case[1] == 3)
)
def test_means_are_unbiased_extrema_are_bounds_and_keys_are_exact(name: str, n: int) -> None:
    call = call_of(23, name)
    exact, draws = logit_stats(call, 2.0), draws_of(call, n)
    for field in ("entropy", "query_norm", "n_queries"):
        assert_mean(draws[field], getattr(exact, field), field)
    # Ratios: their parts are unbiased.
    for field, count in (
        ("mean_logit", "n_pairs"),
        ("share_above", "n_pairs"),
        ("cos_mean", "n_products"),
        ("normalized_entropy", "n_free"),
        ("sink_share", "n_free"),
    ):
        total = getattr(exact, field) * getattr(exact, count)
        # Counts are rounded to whole numbers, hence the sums from them by that much.
        rounding = getattr(exact, field).abs() * 0.5 / getattr(exact, count)
        off = (draws[field] * draws[count]).mean(0) - total
        error = (draws[field] * draws[count]).std(0) / DRAWS**0.5
        assert (off.abs() <= 4 * error + rounding * total.abs() + 0.5 * getattr(exact, field).abs()).all(), field
    assert_mean(draws["qk_frobenius"].square(), exact.qk_frobenius.square(), "qk_frobenius")
    for field in ("max_logit", "capped_max_logit", "query_norm_max", "cos_max"):
        assert (draws[field] <= getattr(exact, field) + 1e-12).all(), field
    for field in ("min_logit", "entropy_min"):
        assert (draws[field] >= getattr(exact, field) - 1e-12).all(), field
    for field in KEYS:
        assert (draws[field] == getattr(exact, field)).all(), field


def test_the_bias_of_ratios_does_not_show() -> None:
    call = call_of(64, "baseline")
    exact, draws = logit_stats(call, 2.0), draws_of(call, 16)
    for field in ("mean_logit", "share_above", "cos_mean", "normalized_entropy", "sink_share"):
        assert_mean(draws[field], getattr(exact, field), field)


@pytest.mark.parametrize("t", [1, 5, 23])
def test_all_queries_give_the_exact_statistics(t: int) -> None:
    call = call_of(t)
    for n in (t, t + 1, 1000):
        found, exact = sampled_stats(call, n, generator=torch.Generator()), logit_stats(call)
        assert all(torch.equal(getattr(found, f), getattr(exact, f)) for f in FIELDS)


@pytest.mark.parametrize(
    "how",
    [
        {"mask": (torch.arange(23) >= torch.tensor([0, 9])[:, None])},
        {"mask": torch.rand(2, 4, 23, 23, generator=torch.Generator().manual_seed(0)) < 0.5},
        {"mask": torch.randn(1, 1, 1, 23, generator=torch.Generator().manual_seed(0)).double(), "causal": False},
        {"pos_q": torch.arange(23) // 2, "pos_k": torch.arange(23)},
    ],
    ids=["padding", "pairs", "bias", "positions"],
)
def test_rows_keep_their_masks_and_positions(how: dict) -> None:
    call = with_query_mask(call_of(23, **how), torch.arange(46).view(2, 23) % 5 != 0)
    exact, draws = logit_stats(call, 2.0), draws_of(call, 6)
    for field in ("n_queries", "n_free", "n_pairs"):
        off = draws[field].double().mean(0) - getattr(exact, field)
        assert (off.abs() <= 4 * draws[field].double().std(0) / DRAWS**0.5 + 0.5).all(), field
    assert_mean(draws["entropy"] * draws["n_queries"] / exact.n_queries, exact.entropy, "entropy")
    assert (draws["max_logit"] <= exact.max_logit + 1e-12).all()
    for field in KEYS:
        assert (draws[field] == getattr(exact, field)).all(), field


def test_the_generator_alone_decides() -> None:
    call, state = call_of(23), torch.get_rng_state()
    first, same, other = (sampled_stats(call, 4, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.entropy, same.entropy)
    assert not torch.equal(first.entropy, other.entropy)


def test_no_queries_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="at least one query, got 0"):
        sampled_stats(call_of(5), 0, generator=torch.Generator())
