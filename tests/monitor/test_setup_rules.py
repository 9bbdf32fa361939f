"""Rounding formulas agree with rounding; gains that grow and norms that do nothing are noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkeel.errors import UnknownNameError
from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.monitor import GainGrowth, History, IdleNorm, Resolution, replay
from qkeel.records import Heads

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def history(**series: np.ndarray) -> History:
    """Records 0, 10, … of [layers heads] series."""
    n = len(next(iter(series.values())))
    steps = np.arange(n) * 10
    values = {name: np.asarray(v, dtype=np.float64) for name, v in series.items()}
    return History.of([{"step": int(s), "lr": 0.1} for s in steps], Heads(steps=steps, values=values))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1.0, 5.0, 17.0])
def test_rounding_q_and_k_moves_logits_as_the_formula_says(dtype: str, size: float) -> None:
    d = 64
    q, k = size * torch.randn(2, 20_000, d, dtype=torch.float64)
    rounded = [x.to(FORMATS[dtype]).double() for x in (q, k)]
    error = (rounded[0] * rounded[1]).sum(-1) / d**0.5 - (q * k).sum(-1) / d**0.5
    expected = fused_logit_error(float(q.norm(dim=1).mean()), float(k.norm(dim=1).mean()), d, dtype)
    assert float(error.std()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("logit", [1.5, 100.0, 1000.0])
def test_storing_logits_moves_them_as_the_formula_says(dtype: str, logit: float) -> None:
    low = 2.0 ** np.floor(np.log2(logit))
    z = low * (1 + torch.rand(50_000, dtype=torch.float64))  # all of the same spacing
    error = (z.to(FORMATS[dtype]).double() - z).std()
    assert float(error) == pytest.approx(stored_logit_error(logit, dtype), rel=0.05)


def test_the_errors_at_the_edges() -> None:
    assert stored_logit_error(0.0, "bf16") == 0.0
    assert stored_logit_error(-100.0, "bf16") == stored_logit_error(100.0, "bf16")
    assert stored_logit_error(float("inf"), "bf16") == float("inf")
    with pytest.raises(UnknownNameError, match="bf16"):
        fused_logit_error(1.0, 1.0, 8, "bf8")


def test_eager_loses_resolution_long_before_fused() -> None:
    logits = np.geomspace(10, 2000, 30)
    norms = np.sqrt(logits * 128**0.5)  # q parallel to k: the longest logit these norms can make
    seen = history(max_logit=logits[:, None, None], query_norm=norms[:, None, None], key_norm=norms[:, None, None])
    kernels = ("eager", "fused")
    eager, fused = (replay(seen, [Resolution(dtype="bf16", kernel=k, head_dim=128)]) for k in kernels)
    assert eager[0].value > 0.25
    assert logits[eager[0].step // 10] < 200
    assert fused[0].step > eager[0].step
    assert "bf16" in str(fused[0])
    assert replay(seen, [Resolution(dtype="fp16", kernel="fused", head_dim=128)]) == []


def test_growing_gains_are_noticed_where_they_grow() -> None:
    bound = np.full((6, 2, 2), 8.0)
    bound[:, 1, 0] = [8, 12, 18, 27, 40, 60]
    (alarm,) = replay(history(gain_bound=bound), [GainGrowth()])
    assert (alarm.step, alarm.layer, alarm.head, alarm.value) == (40, "layer 1", 0, 40.0)
    assert "weight_decay" in alarm.remedy
    assert replay(history(gain_bound=bound[:4]), [GainGrowth()]) == []


def test_a_norm_that_does_nothing_is_noticed_at_the_first_record() -> None:
    normed = np.full((3, 1, 2), 4.0)
    raw = np.array([[[4.0, 5.5]]] * 3)
    rule = IdleNorm(kind="rms", head_dim=16)
    assert replay(history(query_norm=normed, key_norm=normed), [rule]) == []
    (alarm,) = replay(history(query_norm=normed, key_norm=raw), [rule])
    assert (alarm.step, alarm.head) == (0, 1)
    assert "key norms are 5.5, not 4" in str(alarm)
    only_query = IdleNorm(kind="rms", head_dim=16, sides=("query",))
    assert replay(history(query_norm=normed, key_norm=raw), [only_query]) == []
    assert replay(history(query_norm=normed / 4, key_norm=normed / 4), [IdleNorm(kind="l2", head_dim=16)]) == []


def test_gains_that_move_later_are_no_idle_norm_but_a_logit_above_their_bound_is() -> None:
    norms = np.array([4.0, 6.0, 9.0])[:, None, None]
    bound = np.array([4.0, 9.0, 20.0])[:, None, None]
    fine = {"query_norm": norms, "key_norm": norms, "gain_bound": bound}
    rule = IdleNorm(kind="rms", head_dim=16)
    assert replay(history(**fine, max_logit=0.9 * bound), [rule]) == []
    (alarm,) = replay(history(**fine, max_logit=bound * np.array([0.9, 1.0, 2.0])[:, None, None]), [rule])
    assert alarm.step == 20


def test_missing_series_raise_nothing() -> None:
    seen = history(entropy=np.ones((4, 1, 1)))
    rules = [GainGrowth(), IdleNorm(kind="rms", head_dim=4)]
    rules += [Resolution(dtype="bf16", kernel=k, head_dim=4) for k in ("fused", "eager")]
    assert replay(seen, rules) == []
